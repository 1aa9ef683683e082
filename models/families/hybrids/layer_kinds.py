"""The kinds of a hybrid's layers, as config.json lists them, and the layers of these kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from models.config import ConfigError
from models.families.decoders.decoder_spec import DecoderFields, LayerSpec
from models.layers.rotary import Rope
from models.layers.state import StateSpec

Silu = Literal["silu", "swish"]
"""The activation of layers that keep a state, by its two names."""

LINEAR, FULL = "linear_attention", "full_attention"
_OLDER = {"mamba": LINEAR, "attention": FULL}
"""Names that older files have."""


def check_kinds(kinds: Sequence[str], count: int, known: Sequence[str], field: str) -> tuple[str, ...]:
    """Return the kinds of `count` layers, of which each must be one of `known`; `field` lists them."""
    found = tuple(_OLDER.get(kind, kind) for kind in kinds)
    if len(found) != count or not set(found) <= set(known):
        raise ConfigError(
            f"config.json: '{field}' must be {' or '.join(known)} for each of {count} layers, not "
            f"{list(kinds)}"
        )
    return found


def layers_of(
    fields: DecoderFields, kinds: Sequence[str], rope: Rope | None, state: StateSpec | None
) -> tuple[LayerSpec, ...]:
    """Make layers of these kinds: `FULL` ones have attention with this rotation, others keep a state."""
    if state is not None and fields.hidden_act not in get_args(Silu):
        raise ConfigError(
            f"config.json: 'hidden_act' is {fields.hidden_act!r}, and layers that keep a state have silu"
        )
    return tuple(
        LayerSpec(rope=rope, experts=fields.experts(index))
        if kind == FULL
        else LayerSpec(rope=None, state=state, experts=fields.experts(index))
        for index, kind in enumerate(kinds)
    )
