"""Writes the bounds of numbers so that the grammar engine keeps them, though it reads them as float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

from server.errors import BadRequest

EXACT = 1 << 53
"""The largest number up to which float64 has every integer."""
LARGEST = (2**63 - 1) // 640_000 * 640_000
"""The largest bound that is kept: the engine's integers have 64 bits. Float64 has it, with few digits."""

_SIDES = (("minimum", -1), ("maximum", 1))
_KEPT_DIGITS = 15
"""The number of digits with which float64 writes a number as it was read."""
_NEEDS_OTHER = 10**18
"""The engine makes no expression of such numbers without a bound on their other side."""


def enforceable_bounds(schema: Mapping[str, object], param: str) -> dict[str, int]:
    """The bounds to put in place of a schema's own where those are too large to be kept as they are.

    No number between them is outside of the schema's own; a few at their edge are left out. Raises BadRequest
    if there are none.
    """
    found: dict[str, int] = {}
    needs_other: dict[str, bool] = {}
    """The sides that have a bound, and whether the other side needs one for it."""
    for side, sign in _SIDES:
        for key, excluded in ((side, 0), (f"exclusive{side.capitalize()}", 1)):
            if not _is_number(given := schema.get(key)):
                continue
            bound = sign * cast("float", given)  # an upper one, of either side
            if abs(bound) > EXACT - excluded:
                bound = _kept_at_most(math.floor(bound) - excluded)
                if bound is None:
                    limit = f"at most {LARGEST}" if sign < 0 else f"at least -{LARGEST}"
                    raise BadRequest(f"`{key}` of a schema must be {limit}, got {given}.", param)
                found[key] = sign * bound
            needs_other[side] = needs_other.get(side, False) or bound <= -_NEEDS_OTHER
    for side, sign in _SIDES:
        if side not in needs_other and any(needs_other.values()):
            found[side] = sign * LARGEST
    return found


def check_constants(value: object, param: str) -> None:
    """Refuses numbers of `const` and `enum` that the engine would write as others."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)
        elif _is_number(one) and abs(cast("float", one)) > EXACT:
            raise BadRequest(
                f"Numbers in `const` and `enum` of a schema may be up to 2^53, got {one}: larger ones would "
                "not be written exactly. Give them as strings.",
                param,
            )


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _kept_at_most(bound: int) -> int | None:
    """The largest integer up to a bound that float64 keeps and writes as it is; None if there is none."""
    if bound < -LARGEST:
        return None
    bound = min(bound, LARGEST)
    unit = 10 ** max(0, len(str(abs(bound))) - _KEPT_DIGITS)
    kept = bound // unit * unit
    while int(float(kept)) > bound:
        kept -= unit
    return kept
