"""The Transformers engine: chunk KV reuse with selective recompute wherever PyTorch runs, in plain sight."""
