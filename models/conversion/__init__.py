"""Decides what a checkpoint is served as: a model that generates, embeds or classifies."""
