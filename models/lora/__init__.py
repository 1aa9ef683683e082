"""Adapters: merged into their base as it is loaded, or beside it."""
