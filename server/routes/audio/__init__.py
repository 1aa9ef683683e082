"""Routes of recordings."""
