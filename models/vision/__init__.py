"""Towers: networks that turn pictures into rows that stand in the place of embeddings of tokens."""
