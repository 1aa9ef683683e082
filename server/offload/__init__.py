"""Helper processes."""
