"""Bodies and answers of Ollama's API."""
