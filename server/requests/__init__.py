"""Parameters, checked once."""
