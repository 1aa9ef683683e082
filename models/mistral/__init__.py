"""Checkpoints in Mistral's own format: their settings, tokens and names become those of other checkpoints."""
