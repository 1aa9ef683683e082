"""Requests to engines, text back."""
