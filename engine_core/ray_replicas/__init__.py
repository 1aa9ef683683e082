"""Replicas that Ray runs on the machines of its cluster."""
