"""The vLLM engine: chunk KV reuse with selective recompute on stock vLLM, through its own extension points."""
