"""Chunk KV reuse as both engines share it."""
