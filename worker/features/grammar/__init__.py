"""Bounds of what may be sampled, which follow a step."""
