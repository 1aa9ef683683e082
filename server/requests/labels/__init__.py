"""Labels of texts: those that a request names, and what those of a classifier mean."""
