"""Who runs, in which blocks."""
