"""Beam search: what is asked for, what is found, and how answers are chosen."""
