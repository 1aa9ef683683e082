"""The layers of which all families are built."""
