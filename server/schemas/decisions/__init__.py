"""Bodies and answers of APIs that ask typed questions about a text."""
