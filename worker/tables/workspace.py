"""The memory that work on wide tensors takes at a time: larger work is cut into slices of rows."""

from __future__ import annotations

WORKSPACE = 64 << 20
"""Bytes: work on [rows, vocabulary] tensors that can be cut into slices never makes larger ones."""


def slice_rows(vocab_size: int) -> int:
    """How many rows of float32 logits fill the workspace."""
    return max(1, WORKSPACE // (4 * vocab_size))
