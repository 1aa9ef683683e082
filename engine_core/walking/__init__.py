"""What may come next in an answer."""
