"""The kinds of a hybrid's layers, as config.json lists them."""

from __future__ import annotations

from collections.abc import Sequence

from models.config import ConfigError

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
