"""Sockets, frames and keys."""
