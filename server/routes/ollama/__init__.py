"""Routes of Ollama's API."""
