"""The work on query and key heads that lies between their projections and attention."""

from __future__ import annotations

import msgspec
from torch import Tensor


class HeadPrep(msgspec.Struct, frozen=True):
    """Each query and key head is normalised, if there are norms, and then rotated, if there are angles."""

    cos_sin: Tensor | None = None
    """This step's rotation [T, R] float32, as `rotate` reads it."""
    q_norm: Tensor | None = None
    """The weights [D] of an RMS norm over each query head. Both norms are there, or neither is."""
    k_norm: Tensor | None = None
    eps: float = 0.0


AS_PROJECTED = HeadPrep()
"""Heads are used as they are projected."""
