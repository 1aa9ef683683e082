"""Handles the messages of an engine's clients, also of those in its own process."""
