"""The tensors of one step that layers may read beside their input: the only ambient state on this floor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from models.state_rows import StateRow


@dataclass(slots=True)
class StateRows:
    """The places where a step reads and writes states, for kernels and on the host."""

    table: Tensor  # [STATE_COLUMNS, B] int32, as `state_columns` has it
    host: Sequence[StateRow]
    single: bool = False  # whether each row of a recording has one token

    @property
    def guessed(self) -> bool:
        """Whether some rows may be guesses, as far as the host knows of rows: a recording serves any."""
        return not self.host or any(row.more for row in self.host)


@dataclass(slots=True)
class MediaRows:
    """The embeddings of media that stand in the place of tokens of a step."""

    places: Tensor  # [M] int64: the tokens of the step
    rows: Tensor  # [M, H]: put in the place of what was embedded, after its scaling
    deeper: tuple[
        Tensor, ...
    ] = ()  # for each of the first layers, rows [M, H] that are added to what it gives


@dataclass(slots=True)
class AdapterRows:
    """The adapters of a step's tokens."""

    numbers: Tensor  # [T] int32: the number of each token's adapter; 0: none
    runs: Tensor
    """[1 + 3 * R] int32: the number of runs of tokens with the same adapter; then for each the adapter's
    number, the first token and the count of them."""
    host: Sequence[tuple[int, int, int]]  # R of those, on the host


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
    states: StateRows | None = None  # None: no layer has states
    token_types: Tensor | None = None  # [T] int64: 1 for tokens of the second text of a pair; None: all are 0
    seen: list[int] | None = None
    """[B]: the first tokens of each sequence that are seen. Others see these, and no token sees others, as
    where a query is filled up. None: all are seen."""
    plan: dict[Any, Any] | None = None  # the device's plan of this step, which only its own kernels read
    replica_tokens: list[int] = field(default_factory=list[int])  # T of each replica, if they share experts
    chosen: Tensor | None = None  # [T, most] int32: what `ops.choose_tokens` last chose; None: all is read
    media: MediaRows | None = None  # None: the step has no token in whose place an embedding is put
    axes: Tensor | None = (
        None  # [3, T] int64: places in time, rows and columns, where they differ from positions
    )
    last: Tensor | None = None  # [T] int32: the last position that a token may see; None: its own
    whole: Tensor | None = (
        None  # [T] bool: whether a token sees all up to there, past windows; None: none does
    )
    first: int = 0  # the first position that is seen; a token before it sees itself alone
    streams: list[Tensor] | None = None
    """[T, H] each: the residual streams that the decoder has given out, if it was told to."""
    queries: list[Tensor] | None = None
    """[T, heads, D] each: what layers of cross-attention have given out. None: they are not to."""
    adapters: AdapterRows | None = None  # None: no token has one
    source: ForwardContext | None = None
    """The same step for layers that attend to the sources of its sequences, whose lengths, block table and
    `last` are those of the sources. None: the model reads none."""
    others: list[ForwardContext] = field(default_factory=list["ForwardContext"])
    """The same step for layers of other groups, whose keys and values lie in other cache blocks."""


def context_without_rows(replica_tokens: list[int], device: torch.device) -> ForwardContext:
    """The context of a step in which only other replicas have tokens."""
    none, none_wide = torch.empty(0, dtype=torch.int32, device=device), torch.empty(0, dtype=torch.int64)
    return ForwardContext(
        positions=none_wide.to(device),
        query_starts=none,
        kv_lens=none,
        block_table=none.view(0, 0),
        slot_mapping=none_wide.to(device),
        block_size=1,
        query_lens_host=[],
        kv_lens_host=[],
        replica_tokens=replica_tokens,
    )


class _OfThread(threading.local):
    """The step that the layers of a thread compute."""

    current: ForwardContext | None = None


_of_thread = _OfThread()


@contextmanager
def use_context(context: ForwardContext) -> Iterator[None]:
    outer, _of_thread.current = _of_thread.current, context
    try:
        yield
    finally:
        _of_thread.current = outer


def compute_in(context: ForwardContext, forward: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    """Call a forward pass under `use_context`, in fewer calls: each step does."""
    outer, _of_thread.current = _of_thread.current, context
    try:
        return forward(*inputs)
    finally:
        _of_thread.current = outer


def context(group: int = 0) -> ForwardContext:
    """The current step; its block table and slot mapping are those of this group of attention layers."""
    current = _of_thread.current
    if current is None:
        raise RuntimeError("a layer that reads the step's context ran outside use_context()")
    return current.others[group - 1] if group else current
