"""Scoring: how much each token of a text matters, by a small model."""
