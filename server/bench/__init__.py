"""Measures servers: `facet bench`."""
