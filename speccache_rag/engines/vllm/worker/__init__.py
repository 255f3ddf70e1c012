"""The part of the vLLM engine that runs in the process of each rank."""
