"""The way into every endpoint."""
