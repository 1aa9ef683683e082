"""Hidden states to vectors."""
