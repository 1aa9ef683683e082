"""GGUF files, the checkpoints of llama.cpp: what they hold, and how the rest of the house reads it."""
