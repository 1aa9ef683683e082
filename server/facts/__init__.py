"""What the served model can do."""
