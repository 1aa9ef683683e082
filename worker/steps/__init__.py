"""A step: planned, computed, told."""
