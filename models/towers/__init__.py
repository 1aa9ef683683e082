"""Towers: networks that turn pictures and sounds into rows that stand in the place of embeddings of tokens."""
