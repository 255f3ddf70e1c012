"""From a prompt to a plan: which tokens are loaded, recomputed and computed fresh, and the report of it."""
