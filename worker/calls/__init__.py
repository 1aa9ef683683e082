"""Calls of methods of workers."""
