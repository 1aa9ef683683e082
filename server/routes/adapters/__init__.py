"""Requests that name adapters, and requests that load them."""
