"""Grammars, compiled in threads."""
