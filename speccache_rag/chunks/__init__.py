"""Known chunks: their texts, how they are found in a prompt, how their KV gets into the store."""
