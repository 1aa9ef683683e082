"""The operations a layer may call, under one name each: `ops.rms_norm(...)`.

They are the plain torch ones of `reference.py` until a worker that has faster kernels binds them with `use`.
Layers must call them as attributes of this module, so that a new binding is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from models.ops.reference import (
    activation,
    add_rms_norm,
    attention,
    encoder_attention,
    gated,
    layer_norm,
    linear,
    pack,
    rms_norm,
    rotary_and_cache,
    rotate,
)

__all__ = [
    "activation",
    "add_rms_norm",
    "attention",
    "encoder_attention",
    "gated",
    "layer_norm",
    "linear",
    "pack",
    "rms_norm",
    "rotary_and_cache",
    "rotate",
    "use",
]


def use(table: Mapping[str, Callable[..., Any]]) -> None:
    """Rebind some of the operations, for the whole process. Must precede loading: `pack` runs there."""
    known = [name for name in __all__ if name != "use"]
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise ValueError(f"no such operation: {', '.join(unknown)}; there are {', '.join(known)}")
    globals().update(table)
