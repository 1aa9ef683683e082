"""Guesses of what will be sampled, and drafters, which make some."""
