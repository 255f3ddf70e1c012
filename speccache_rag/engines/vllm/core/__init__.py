"""The part of the vLLM engine that runs in the scheduler's process."""
