"""One page for each family."""
