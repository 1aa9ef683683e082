"""Attention to a cache that is cut over ranks by tokens.

The chunks of CHUNK positions, in whose order attention adds up, lie with the ranks in turn: chunk c with rank
c modulo their number. So a block of the cache has a chunk on each rank, and results have the bits of one:

- Of rows with few new tokens the queries go to all ranks. Each computes the states of its own chunks, and
  merges those of its own heads in ascending order.
- Rows with many get the keys and values of this rank's heads from all ranks, a layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from models import ops
from models.context import ForwardContext
from models.ops.context_ops import CHUNK
from models.parallel.parallel import ContextRanks

_FEW = 8
"""The most new tokens of a row that are computed one by one, where they stand: each reads all keys anew."""
_MOST_STATES = 1 << 12
_MOST_GATHERED = 1 << 13
"""The most chunks whose states, and the most positions whose keys are exchanged at once, but for one row."""
DIMS = 16
"""States are computed of heads of a multiple of so many dimensions; of others keys are gathered."""

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class _JoinedTokens:
    """Tokens whose attention is merged from the states of all ranks."""

    tokens: Tensor  # [R] int64: the tokens of the step
    own: ForwardContext
    """A row for each of them, with its keys on this rank."""
    counts: Tensor  # [R] int32: the chunks of each
    most: int
    """The most chunks of one."""


@dataclass(frozen=True, slots=True)
class _GatheredRows:
    """Rows whose keys and values are gathered from all ranks."""

    tokens: Tensor  # [N] int64: the tokens of the step
    rows: ForwardContext
    """The rows over what is gathered."""
    blocks: Tensor
    """The blocks with this rank's chunks of these rows."""
    places: list[Tensor]
    """For each rank, where its chunks lie among all that are gathered."""


@dataclass(frozen=True, slots=True)
class _CutStep:
    written: ForwardContext
    """The step with the places of keys on this rank; those that others hold go to the scratch block."""
    joined: list[_JoinedTokens]
    gathered: list[_GatheredRows]


@dataclass(frozen=True)
class CutHeads:
    """The key heads of a layer whose cache this rank shares with others, and its own ones among them."""

    ranks: ContextRanks
    kv_heads: int
    """The heads for which this rank computes keys and values."""
    copies: int = 1
    """How many of the ranks, side by side, compute the same ones."""
    joins: bool = True
    """Whether tokens may be computed by joining states."""

    @property
    def cached(self) -> int:
        """The heads of which keys and values are cached here, for some positions."""
        return self.kv_heads * self.ranks.size // self.copies

    def heads_of(self, rank: int) -> slice:
        first = rank // self.copies * self.kv_heads
        return slice(first, first + self.kv_heads)

    def gather(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values [T, kv_heads, D] of all cached heads, from those of each rank."""
        tokens, heads, dim = k.shape
        everyone = self.ranks.group.all_gather(torch.stack([k, v], 1).flatten(1))
        apart = everyone.view(tokens, self.ranks.size, 2, heads, dim)[:, :: self.copies]
        keys, values = (each.reshape(tokens, self.cached, dim) for each in apart.unbind(2))
        return keys, values

    def written(self, step: ForwardContext, kv: Tensor) -> ForwardContext:
        """The step with the places where keys and values are written in this rank's cache."""
        return self._plan(step, kv).written

    def attend(
        self, q: Tensor, kv: Tensor, step: ForwardContext, *, last: Tensor | None, **limits: Any
    ) -> Tensor:
        """What `ops.attention` is, of prepared queries [T, heads, D] to the cache of all ranks."""
        plan, out = self._plan(step, kv), torch.empty_like(q)
        for each in plan.joined:
            out[each.tokens] = self._join(q[each.tokens], kv, each, limits)
        for each in plan.gathered:
            cache = self._collect(kv, each)
            seen = None if last is None else last[each.tokens]
            out[each.tokens] = ops.attention(q[each.tokens], cache, each.rows, last=seen, **limits)
        return out

    def _join(self, q: Tensor, kv: Tensor, joined: _JoinedTokens, limits: dict[str, Any]) -> Tensor:
        ranks, (rows, heads, dim) = self.ranks, q.shape
        everyone = ranks.group.all_gather(q.flatten(1)).view(rows, ranks.size * heads, dim)
        states = ops.attention_states(
            everyone, kv, joined.own, scale=limits["scale"], softcap=limits["softcap"]
        )
        own = states.permute(1, 3, 0, 2, 4).flatten(0, 1)  # [all heads, R, chunks, D + 2]
        out = [each.contiguous() for each in own.split(heads)]
        into = [
            q.new_empty(heads, rows, len(range(rank, joined.most, ranks.size)), dim + 2, dtype=torch.float32)
            for rank in range(ranks.size)
        ]
        ranks.group.exchange(out, into).wait()
        merged = torch.empty(heads, rows, joined.most, dim + 2, device=q.device)
        for rank, each in enumerate(into):
            merged[:, :, rank :: ranks.size] = each
        return ops.join_states(merged, joined.counts, q.dtype, limits["sinks"])

    def _collect(self, kv: Tensor, gathered: _GatheredRows) -> Tensor:
        """A cache [2, chunks, kv_heads, CHUNK, R] of this rank's heads."""
        mine = kv.index_select(1, gathered.blocks)
        out = [mine[:, :, self.heads_of(rank)].contiguous() for rank in range(self.ranks.size)]
        sizes = (self.kv_heads, *kv.shape[3:])
        into = [kv.new_empty(2, len(places), *sizes) for places in gathered.places]
        self.ranks.group.exchange(out, into).wait()
        cache = kv.new_empty(2, sum(map(len, gathered.places)), *sizes)
        for places, each in zip(gathered.places, into, strict=True):
            cache[:, places] = each
        return cache

    def _plan(self, step: ForwardContext, kv: Tensor) -> _CutStep:
        """The plan of a step, which its first layer makes for all."""
        if self.joins not in step.cuts:
            step.cuts[self.joins] = _cut_step(step, self.ranks, kv.shape[1] - 1, joins=self.joins)
        return step.cuts[self.joins]

    def step_bytes(self, heads: int, dim: int, positions: int, itemsize: int) -> int:
        """An upper bound of the bytes that a step takes beside those of a cache that is not cut."""
        row = -(-positions // CHUNK)
        states = 3 * 4 * max(row, _MOST_STATES) * self.ranks.size * heads * (dim + 2)
        return states + 3 * max(positions + CHUNK, _MOST_GATHERED) * 2 * self.kv_heads * dim * itemsize


def _cut_step(step: ForwardContext, ranks: ContextRanks, scratch: int, *, joins: bool) -> _CutStep:
    block, place = step.slot_mapping // step.block_size, step.slot_mapping % step.block_size
    here = torch.where(place // CHUNK == ranks.rank, block, scratch)
    few: list[tuple[int, int, int]] = []  # row, token, and positions that it sees
    many: list[tuple[int, int, int, int]] = []  # row, first token, new tokens, all of them
    start = 0
    for row, (new, total) in enumerate(zip(step.query_lens_host, step.kv_lens_host, strict=True)):
        if joins and (new == 1 or (new <= _FEW and step.last is None)):
            few += [(row, start + i, total - new + i + 1) for i in range(new)]
        else:
            many.append((row, start, new, total))
        start += new
    return _CutStep(
        _context(step, step.positions, here * CHUNK + place % CHUNK, [], [], step.block_table),
        [_joined(step, ranks, rows) for rows in _batches(few, lambda row: _chunks(row[2]), _MOST_STATES)],
        [_gathered(step, ranks, rows) for rows in _batches(many, lambda row: row[3], _MOST_GATHERED)],
    )


def _joined(step: ForwardContext, ranks: ContextRanks, rows: Sequence[tuple[int, int, int]]) -> _JoinedTokens:
    of_row, tokens, ends = (list(column) for column in zip(*rows, strict=True))
    held = [_keys_of(ranks, end) for end in ends]
    at = torch.tensor(tokens)
    table = step.block_table[torch.tensor(of_row), : _chunks(max(held))].contiguous()
    own = _context(step, step.positions[at], at, [1] * len(rows), held, table)
    counts = torch.tensor([_chunks(end) for end in ends], dtype=torch.int32)
    return _JoinedTokens(at, own, counts, _chunks(max(ends)))


def _gathered(
    step: ForwardContext, ranks: ContextRanks, rows: Sequence[tuple[int, int, int, int]]
) -> _GatheredRows:
    chunks = [_chunks(total) for *_, total in rows]
    begins = [0, *accumulate(chunks)][:-1]

    def places(rank: int) -> Tensor:
        of_rows = zip(begins, chunks, strict=True)
        each = [begin + chunk for begin, count in of_rows for chunk in range(rank, count, ranks.size)]
        return torch.tensor(each, dtype=torch.int64)

    tokens = torch.cat([torch.arange(first, first + new) for _, first, new, _ in rows])
    table = torch.tensor(begins)[:, None] + torch.arange(max(chunks))
    counts, ends = [new for *_, new, _ in rows], [total for *_, total in rows]
    held = [len(range(ranks.rank, count, ranks.size)) for count in chunks]
    blocks = [step.block_table[row, :count] for (row, *_), count in zip(rows, held, strict=True)]
    context = _context(step, step.positions[tokens], tokens, counts, ends, table.int())
    return _GatheredRows(tokens, context, torch.cat(blocks), [places(rank) for rank in range(ranks.size)])


def _context(
    step: ForwardContext, positions: Tensor, slots: Tensor, counts: list[int], ends: list[int], table: Tensor
) -> ForwardContext:
    """A step with these rows over blocks of one chunk; without any, it is for writing keys and values."""
    return ForwardContext(
        positions=positions,
        query_starts=torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
        kv_lens=torch.tensor(ends, dtype=torch.int32),
        block_table=table,
        slot_mapping=slots,
        block_size=CHUNK,
        query_lens_host=counts,
        kv_lens_host=ends,
    )


def _batches(rows: Sequence[_Row], size: Callable[[_Row], int], most: int) -> Iterator[list[_Row]]:
    """Divide rows, so that their number times the largest size is at most `most`, but for one row alone."""
    batch: list[_Row] = []
    largest = 0
    for row in rows:
        if batch and (len(batch) + 1) * max(largest, size(row)) > most:
            yield batch
            batch, largest = [], 0
        batch.append(row)
        largest = max(largest, size(row))
    if batch:
        yield batch


def _chunks(positions: int) -> int:
    return -(-positions // CHUNK)


def _keys_of(ranks: ContextRanks, length: int) -> int:
    """The number of a sequence's first positions that this rank holds."""
    full, rest = divmod(length, CHUNK * ranks.size)
    return full * CHUNK + min(max(rest - ranks.rank * CHUNK, 0), CHUNK)
