"""Bodies read and checked, prompts."""
