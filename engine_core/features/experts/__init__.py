"""Experts that several engines compute together, and that are moved by load."""
