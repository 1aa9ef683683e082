"""Prepares pictures and sounds for a model: pixels or features, and tokens in the prompt. No torch."""
