"""Towers of models that read documents, which begin with that of SAM."""
