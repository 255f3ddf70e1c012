"""Plans of prompts: which tokens are loaded, recomputed and computed fresh, why, and the reports of it."""
