"""Rows and positions on the device."""
