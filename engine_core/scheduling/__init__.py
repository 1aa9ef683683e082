"""Decides which sequences a step computes, and in which cache blocks."""
