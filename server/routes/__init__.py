"""One file for a kind of endpoint."""
