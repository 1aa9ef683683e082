"""Paths of other servers and platforms that have no API of their own here: each answers as its own does."""
