"""Requests before they go to the scheduler."""
