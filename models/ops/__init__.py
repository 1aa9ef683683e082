"""What layers may compute: each operation under one name, `ops.rms_norm(...)`.

They are the plain torch ones of `reference.py` and the other references beside it, unless the worker has one
for its device and binds it with `use`. Layers must call them as attributes of this module, so that a new
binding is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from models.ops import expert_reference, latent_reference, pooling_reference, reference
from models.ops.expert_reference import add_gated, collect_experts, experts, route
from models.ops.latent_reference import front_rms_norm, latent_attention, pack_latent
from models.ops.pooling_reference import apart, pool
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
    scale_by_position,
    split_words,
    spread_rms_norm,
    sum_squares,
)

__all__ = [
    "activation",
    "add",
    "add_gated",
    "add_layer_norm",
    "add_rms_norm",
    "angles",
    "apart",
    "attention",
    "collect_experts",
    "embed",
    "encoder_attention",
    "experts",
    "front_rms_norm",
    "gated",
    "gated_linear",
    "latent_attention",
    "layer_norm",
    "linear",
    "mean",
    "normalize",
    "pack",
    "pack_latent",
    "pool",
    "rms_norm",
    "rotary_and_cache",
    "rotate",
    "route",
    "scale",
    "scale_by_position",
    "split_words",
    "spread_rms_norm",
    "sum_squares",
    "unpacked",
    "use",
]


SPECIFIED: Mapping[str, Callable[..., Any]] = (
    vars(expert_reference) | vars(latent_reference) | vars(pooling_reference) | vars(reference)
)
"""The reference of each operation, by its name."""

_REFERENCE = {name: SPECIFIED[name] for name in __all__ if name not in ("use", "unpacked")}


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
    """Let functions that pack return the first part as it is, for models that are never run."""
    bound = {name: globals()[name] for name in ("pack", "pack_latent")}
    globals().update(dict.fromkeys(bound, lambda *parts, **options: parts[0]))
    try:
        yield
    finally:
        globals().update(bound)
