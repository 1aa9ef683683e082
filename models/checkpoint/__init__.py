"""Files and weights."""
