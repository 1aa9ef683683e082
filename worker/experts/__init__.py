"""Experts, moved by load."""
