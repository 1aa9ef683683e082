"""The memory of what later steps read: entries of attention, and states."""
