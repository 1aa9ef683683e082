"""Pieces for ranks."""
