"""Tool calls and reasoning, read."""
