"""Commands of a terminal."""
