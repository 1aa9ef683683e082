"""Towers: networks that turn pictures and sounds into rows in the place of embeddings of tokens."""
