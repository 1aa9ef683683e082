"""Logits processors of the operator."""
