"""Replicas that step together."""
