"""Readers of engine options whose values are JSON objects."""
