"""The memory that work on wide tensors takes at a time: larger work is cut into slices of rows."""

from __future__ import annotations

WORKSPACE = 64 << 20
"""The most bytes of a tensor [slice of rows, vocabulary], where work can be cut into slices of rows."""


def slice_rows(vocab_size: int) -> int:
    """The number of rows of float32 logits that fill the workspace."""
    return max(1, WORKSPACE // (4 * vocab_size))
