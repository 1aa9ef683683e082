"""The tensors of one step that layers may read beside their input: the only ambient state on this floor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class ForwardContext:
    """A step computes T new tokens that belong to B sequences, packed one after the other without padding."""

    positions: Tensor  # [T] int64: position of each token in its sequence
    query_starts: Tensor  # [B + 1] int32: row b owns tokens query_starts[b] : query_starts[b + 1]
    kv_lens: Tensor  # [B] int32: tokens of each sequence once this step is done
    block_table: Tensor  # [B, max_blocks] int32: the cache blocks of each sequence, in order
    slot_mapping: Tensor  # [T] int64: block * block_size + offset, where each token's K and V go
    block_size: int
    # The same counts on the host: the scheduler knows them without asking the device.
    query_lens_host: list[int]  # [B]
    kv_lens_host: list[int]  # [B]
    token_types: Tensor | None = None  # [T] int64: 1 for tokens of the second text of a pair; None: all are 0
    plan: dict[Any, Any] | None = None  # the device's plan of this step, which only its own kernels read


_current: ForwardContext | None = None


@contextmanager
def use_context(context: ForwardContext) -> Iterator[None]:
    global _current
    outer, _current = _current, context
    try:
        yield
    finally:
        _current = outer


def context() -> ForwardContext:
    if _current is None:
        raise RuntimeError("a layer that reads the step's context ran outside use_context()")
    return _current
