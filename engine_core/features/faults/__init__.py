"""Requests that must end early: by a deadline, or because steps with them fail."""
