"""Messages about LoRA adapters between servers and engines, and checks of adapters' files."""
