"""Adapters that requests name: which are loaded, and which the sequences of a step may have."""
