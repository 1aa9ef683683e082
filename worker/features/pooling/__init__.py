"""Texts that become vectors or scores."""
