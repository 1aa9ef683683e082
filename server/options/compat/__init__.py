"""Flags and variables of other servers."""
