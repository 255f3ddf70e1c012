"""The part of the vLLM engine that runs in the user's process."""
