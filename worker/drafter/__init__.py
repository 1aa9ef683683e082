"""Drafters: models that guess what the served one will sample, one module for each kind."""
