"""The operations that layers may call, each under one name: `ops.rms_norm(...)`.

They are the plain torch ones of `reference.py` and the other references beside it, unless the worker has one
for its device and binds it with `use`. Layers must call them as attributes of this module, so that a new
binding is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from models.ops.block_codes import split_blocks  # noqa: F401
from models.ops.encoder_ops import (  # noqa: F401
    disentangled_attention,
    encoder_attention,
    patches,
)
from models.ops.expert_routing_ops import add_gated, collect_experts, experts, route  # noqa: F401
from models.ops.fused_ops import (  # noqa: F401
    add_product,
    fused_layer,
    project_gates,
    project_heads,
)
from models.ops.latent_ops import (  # noqa: F401
    choose_tokens,
    front_rms_norm,
    latent_attention,
    pack_latent,
)
from models.ops.lora_ops import adapt_embeddings, hold_adapters, lora  # noqa: F401
from models.ops.pooling_ops import apart, normalize, pool  # noqa: F401
from models.ops.recurrent_ops import (  # noqa: F401
    causal_conv,
    channel_delta,
    channel_scan,
    gate,
    gated_delta,
    gated_group_norm,
    gated_norm,
    group_squares,
    keep_guesses,
    selective_scan,
)
from models.ops.reference import (  # noqa: F401
    activation,
    add,
    add_layer_norm,
    add_rms_norm,
    angles,
    attention,
    embed,
    gated,
    gated_linear,
    layer_norm,
    linear,
    pack,
    rms_norm,
    rotary_and_cache,
    rotate,
    scale,
    scale_by_position,
    split_words,
    spread_rms_norm,
    sum_squares,
    xielu,
)
from models.ops.stream_ops import correct_streams, predict_streams, sum_rows  # noqa: F401

SPECIFIED: Mapping[str, Callable[..., Any]] = {
    name: value
    for name, value in list(globals().items())
    if isinstance(value, FunctionType) and value.__module__.startswith(f"{__name__}.")
}
"""The reference of each operation, by its name."""


def use(table: Mapping[str, Callable[..., Any]]) -> None:
    """Compute with these operations, and with the reference for all others, in the whole process.

    Must precede loading: `pack` runs there.
    """
    unknown = sorted(table.keys() - SPECIFIED.keys())
    if unknown:
        raise ValueError(f"no such operation: {', '.join(unknown)}; there are {', '.join(sorted(SPECIFIED))}")
    globals().update({**SPECIFIED, **table})


@contextmanager
def unpacked() -> Iterator[None]:
    """Let functions that pack return the first part as it is, for models that are never run."""
    bound = {name: globals()[name] for name in ("pack", "pack_latent")}
    globals().update(dict.fromkeys(bound, lambda *parts, **options: parts[0]))
    try:
        yield
    finally:
        globals().update(bound)
