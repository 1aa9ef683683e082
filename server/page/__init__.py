"""The web page and its live data."""
