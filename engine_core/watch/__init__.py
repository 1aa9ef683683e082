"""Progress, and when none is made."""
