"""Engines, as a server sees them."""
