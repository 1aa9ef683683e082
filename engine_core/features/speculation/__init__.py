"""Guesses of the tokens that come next: from earlier text, and only as many as gain time."""
