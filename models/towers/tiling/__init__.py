"""Towers of models that cut a picture into tiles or slices."""
