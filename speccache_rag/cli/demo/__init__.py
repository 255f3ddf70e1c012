"""The demo: questions about the packages installed in this environment."""
