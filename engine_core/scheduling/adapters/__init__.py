"""Decides which adapters workers have, and which of them a step computes with."""
