"""The operations a layer may call, under one name each: `ops.rms_norm(...)`.

They are the plain torch ones of `reference.py`, unless the worker has one for its device and binds it with
`use`. Layers must call them as attributes of this module, so that a new binding is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from models.ops import reference
from models.ops.reference import (
    activation,
    add,
    add_layer_norm,
    add_rms_norm,
    angles,
    attention,
    embed,
    encoder_attention,
    gated,
    gated_linear,
    layer_norm,
    linear,
    mean,
    normalize,
    pack,
    rms_norm,
    rotary_and_cache,
    rotate,
    scale,
    spread_rms_norm,
    sum_squares,
)

__all__ = [
    "activation",
    "add",
    "add_layer_norm",
    "add_rms_norm",
    "angles",
    "attention",
    "embed",
    "encoder_attention",
    "gated",
    "gated_linear",
    "layer_norm",
    "linear",
    "mean",
    "normalize",
    "pack",
    "rms_norm",
    "rotary_and_cache",
    "rotate",
    "scale",
    "spread_rms_norm",
    "sum_squares",
    "unpacked",
    "use",
]


_REFERENCE: dict[str, Callable[..., Any]] = {
    name: getattr(reference, name) for name in __all__ if name not in ("use", "unpacked")
}


def use(table: Mapping[str, Callable[..., Any]]) -> None:
    """Compute with these operations, and with the reference for all others, in the whole process.

    Must precede loading: `pack` runs there.
    """
    unknown = sorted(table.keys() - _REFERENCE.keys())
    if unknown:
        raise ValueError(f"no such operation: {', '.join(unknown)}; there are {', '.join(_REFERENCE)}")
    globals().update(_REFERENCE | dict(table))


@contextmanager
def unpacked() -> Iterator[None]:
    """Let `pack` return the first part as it is, for models that are never run."""
    bound = globals()["pack"]
    globals()["pack"] = lambda *parts, **options: parts[0]
    try:
        yield
    finally:
        globals()["pack"] = bound
