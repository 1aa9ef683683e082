"""What an engine does with messages of its clients, and how those in its own process reach it."""
