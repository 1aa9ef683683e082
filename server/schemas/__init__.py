"""Bodies and answers, by field."""
