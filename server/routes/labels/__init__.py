"""Endpoints that label texts, or pieces of them."""
