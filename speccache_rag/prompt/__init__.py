"""Prompts as text and tokens: chat templates, and tokenization with known chunks in it."""
