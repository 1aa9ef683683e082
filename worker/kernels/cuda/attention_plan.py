"""The plan of a step's attention: which program computes which tokens of which row.

A step of decoding rows and prompts makes two launches: blocks of few rows whose keys are split over programs,
and large ones. One size for both would waste most of either. Blocks are planned on the host, in numpy, once
for a step, and kept in its context, where all layers find them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.context import ForwardContext
from worker.kernels.cuda.capabilities import (
    LEAST_KEYS,
    SHORT_ROWS,
    Card,
    Tiles,
    attention_tiles,
    latent_tiles,
)

MOST_SPLITS = 32


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a layer that this rank holds."""

    queries: int
    keys: int
    dim: int
    latent: bool = False
    """Whether these are parts of the heads of latent attention, whose cached rows are `dim` wide."""

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.queries // self.keys


PlanKey = tuple[Heads, torch.dtype, bool]
"""Heads, their number type, and whether sequences have a cache."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of one launch, on the host."""

    rows: np.ndarray  # [N] int32: the row of the step that each block belongs to
    tokens: np.ndarray  # [N] int32: the first of its tokens, counted from those of the row
    splits: int
    short: bool


@dataclass(frozen=True, slots=True)
class Launch:
    """The blocks of one launch, on the device."""

    rows: Tensor  # [N] int32
    tokens: Tensor  # [N] int32
    splits: int
    tiles: Tiles
    padded: bool = False
    """Whether the step has tokens that are in no block, because they were filled up. Their results are 0."""

    @classmethod
    def of(cls, blocks: Blocks, tiles: Tiles, send: Callable[[np.ndarray], Tensor]) -> Launch:
        return cls(send(blocks.rows), send(blocks.tokens), blocks.splits, tiles)


Plan = dict[PlanKey, list[Launch]]


def launches_of(card: Card, context: ForwardContext, key: PlanKey) -> list[Launch]:
    """The launches of a step for one kind of heads. Those that nobody has sent with the step are sent now."""
    if context.plan is None:
        context.plan = {}
    plan: Plan = context.plan
    if key not in plan:
        target, new, total = context.query_starts.device, context.query_lens_host, context.kv_lens_host
        plan[key] = [
            Launch.of(blocks, tiles, lambda numbers: _sent(numbers, target))
            for blocks, tiles in plan_step(card, key, new, total)
        ]
    return plan[key]


def _sent(numbers: np.ndarray, target: torch.device) -> Tensor:
    """Copy numbers to the device without waiting for what is queued there."""
    host = torch.from_numpy(numbers)
    return host.pin_memory().to(target, non_blocking=True) if target.type == "cuda" else host.to(target)


def empty_results(planned: Sequence[Launch], q: Tensor) -> Tensor:
    """Memory for the results of launches, in the shape of queries [T, heads, D]."""
    make = torch.zeros if any(blocks.padded for blocks in planned) else torch.empty
    return make(q.shape, dtype=q.dtype, device=q.device)


def plan_step(
    card: Card, key: PlanKey, new: Sequence[int], total: Sequence[int]
) -> list[tuple[Blocks, Tiles]]:
    """The blocks of a step for one kind of heads: rows have `new` tokens at the end of `total`."""
    heads, _, paged = key
    short, long = _tiles(card, key)
    if not paged:
        return [(blocks, long) for blocks in plan_texts(new, heads, long)]
    planned = plan_prompts_and_decodes(new, total, heads, short, long, card.processors)
    return [(blocks, short if blocks.short else long) for blocks in planned]


def _tiles(card: Card, key: PlanKey) -> tuple[Tiles, Tiles]:
    """The tiles of blocks of few rows, and of large ones."""
    heads, dtype, _ = key
    if heads.latent:
        return latent_tiles(dtype, short=True), latent_tiles(dtype, short=False)
    capability, dim, group = card.capability, heads.dim, heads.group
    short = attention_tiles(capability, dtype, dim, group, short=True)
    return short, attention_tiles(capability, dtype, dim, group, short=False)


def plan_prompts_and_decodes(
    new: Sequence[int],
    total: Sequence[int],
    heads: Heads,
    short: Tiles,
    long: Tiles,
    processors: int,
) -> list[Blocks]:
    """Launches for rows with `new` tokens at the end of `total`, on a card with so many multiprocessors."""
    counts, lengths = np.asarray(new), np.asarray(total)
    few = (counts * heads.group <= SHORT_ROWS) | (counts == 1)
    many = ~few
    launches: list[Blocks] = []
    if few.any():
        rows, tokens = cut(np.flatnonzero(few), counts, short.queries // heads.group)
        splits = _splits(len(rows) * heads.keys, int(lengths[few].max()), processors)
        launches.append(Blocks(rows, tokens, splits, short=True))
    if many.any():
        rows, tokens = cut(np.flatnonzero(many), counts, long.queries // heads.group)
        ends = (lengths - counts)[rows] + tokens
        launches.append(_longest_first(rows, tokens, ends))
    return launches


def plan_texts(lengths: Sequence[int], heads: Heads, tiles: Tiles) -> list[Blocks]:
    """The launch for whole texts, each of which sees all of itself."""
    counts = np.asarray(lengths)
    rows, tokens = cut(np.arange(len(counts)), counts, tiles.queries // heads.group)
    return [_longest_first(rows, tokens, counts[rows])]


def cut(rows: np.ndarray, counts: np.ndarray, each: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut the tokens of some rows into blocks of `each`: -> the row and the first token of every block."""
    blocks = -(-counts[rows] // each)
    firsts = np.arange(blocks.sum()) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    return np.repeat(rows, blocks).astype(np.int32), (firsts * each).astype(np.int32)


def _longest_first(rows: np.ndarray, tokens: np.ndarray, work: np.ndarray) -> Blocks:
    """Begin with the blocks that read most keys: a long one that starts last would be waited for."""
    order = np.argsort(-work, kind="stable")
    return Blocks(rows[order], tokens[order], splits=1, short=False)


def _splits(programs: int, longest: int, processors: int) -> int:
    """The power of two that gives nearly every multiprocessor two programs, as far as keys are many enough.

    An H100 read the keys of 256 programs on 132 multiprocessors at 2.86 TB/s, and of twice as many at 2.70.
    """
    splits, enough = 1, 15 * processors // 8
    while splits < MOST_SPLITS and 2 * splits * LEAST_KEYS <= longest and programs * splits < enough:
        splits *= 2
    return splits


@dataclass(frozen=True, slots=True)
class Room:
    """One launch with room for the blocks of any step up to some size; a step fills it up with -1."""

    size: int
    splits: int
    short: bool


def plan_room(card: Card, key: PlanKey, tokens: int, rows: int, longest: int) -> list[tuple[Room, Tiles]]:
    """The launches that take the blocks of any step of up to so many tokens of so many rows."""
    heads, _, paged = key
    short, long = _tiles(card, key)
    if not paged:
        return [(room_for_large_blocks(tokens, min(rows, tokens), long.queries // heads.group), long)]
    rooms = room_for_prompts_and_decodes(tokens, rows, longest, heads, long, card.processors)
    return [(room, short if room.short else long) for room in rooms]


def room_for_prompts_and_decodes(
    tokens: int, rows: int, longest: int, heads: Heads, long: Tiles, processors: int
) -> list[Room]:
    """The room that steps of up to so many tokens of so many rows need; no sequence is longer than `longest`.

    A short row is one block. The others have a token more at least, and end with a block that is not full.
    """
    few = min(tokens, rows)
    splits = _splits(few * heads.keys, longest, processors)
    least = max(1, SHORT_ROWS // heads.group) + 1
    large = room_for_large_blocks(tokens, min(rows, tokens // least), long.queries // heads.group)
    return [Room(few, splits, short=True), *([large] if large.size else [])]


def room_for_large_blocks(tokens: int, rows: int, each: int) -> Room:
    return Room((tokens + rows * (each - 1)) // each, splits=1, short=False)
