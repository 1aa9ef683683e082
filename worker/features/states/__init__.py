"""States of layers without keys and values, and those that are remembered."""
