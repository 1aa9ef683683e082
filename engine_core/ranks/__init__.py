"""Workers in their own processes."""
