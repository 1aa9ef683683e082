"""The plan of a step's attention: which program computes which tokens of which row.

A step of decoding rows and prompts makes two launches: blocks of few rows, the keys of long ones split over
programs, and large ones. One size for both would waste most of either. Latent attention has a third, for
prompts that follow nothing. Blocks are planned on the host, in numpy, once for a step, sent with what it
brings (`PlannedLayout`), and kept in its context, where all layers find them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from models.context import ForwardContext
from worker.kernels.cuda.capabilities import (
    LEAST_KEYS,
    LEAST_MADE,
    SHORT_ROWS,
    Card,
    Tiles,
    attention_tiles,
    latent_tiles,
    made_tiles,
)
from worker.tables.positions import Columns, StepTokens, lay_out
from worker.tables.slots import Slots
from worker.tables.staging import Packet


class Kind(Enum):
    """The kinds of launches."""

    SHORT = "decoding tokens, or a few more"
    LONG = "tokens of prompts and texts"
    MADE = "tokens of prompts that follow nothing, whose keys and values are made of latents"


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a layer that this rank holds."""

    queries: int
    keys: int
    dim: int
    made: int = 0
    """The numbers of keys or values, whichever have more, that are made of the latents of prompts.

    Then these are parts of the heads of latent attention, whose cached rows are `dim` wide. 0: others.
    """

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
    kind: Kind
    split: int = 0
    """The entries of blocks whose keys are split, which stand before all others.

    A block that holds a whole row has an entry for each split: in place of its first token its number, and
    from bit 16 on how many others the block has.
    """


@dataclass(frozen=True, slots=True)
class Launch:
    """The blocks of one launch, on the device."""

    rows: Tensor  # [N] int32
    tokens: Tensor  # [N] int32
    tiles: Tiles
    kind: Kind
    split: int = 0
    """The entries, at the beginning, that may be splits: `tokens` are as `Blocks.split` says then."""
    padded: bool = False
    """Whether the step has tokens that are in no block, because they were filled up. Their results are 0."""

    @classmethod
    def of(cls, blocks: Blocks, tiles: Tiles, send: Callable[[np.ndarray], Tensor]) -> Launch:
        return cls(send(blocks.rows), send(blocks.tokens), tiles, blocks.kind, blocks.split)


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
    tiles = _tiles(card, key)
    if paged:
        planned = plan_prompts_and_decodes(new, total, heads, tiles, card.processors)
    else:
        planned = plan_texts(new, heads, tiles[Kind.LONG])
    return [(blocks, tiles[blocks.kind]) for blocks in planned]


def _tiles(card: Card, key: PlanKey) -> dict[Kind, Tiles]:
    """The tiles of each kind of blocks."""
    heads, dtype, _ = key
    capability, dim, group = card.capability, heads.dim, heads.group
    if heads.made:
        short, long = (latent_tiles(capability, dtype, group, short=short) for short in (True, False))
        made = made_tiles(capability, dtype, heads.made)
        return {Kind.SHORT: short, Kind.LONG: long, Kind.MADE: made}
    short, long = (attention_tiles(capability, dtype, dim, group, short=short) for short in (True, False))
    return {Kind.SHORT: short, Kind.LONG: long}


def plan_prompts_and_decodes(
    new: Sequence[int],
    total: Sequence[int],
    heads: Heads,
    tiles: Mapping[Kind, Tiles],
    processors: int,
) -> list[Blocks]:
    """Launches for rows with `new` tokens at the end of `total`, on a card with so many multiprocessors."""
    counts, lengths = np.asarray(new), np.asarray(total)
    few = (counts * heads.group <= SHORT_ROWS) | (counts == 1)
    made = ~few & (counts == lengths) & (counts >= LEAST_MADE) & (heads.made > 0)
    launches: list[Blocks] = []
    if few.any():
        launches.append(split_rows(np.flatnonzero(few), lengths, heads, processors))
    for kind, chosen, group in ((Kind.LONG, ~few & ~made, heads.group), (Kind.MADE, made, 1)):
        if chosen.any():
            rows, tokens = cut(np.flatnonzero(chosen), counts, tiles[kind].queries // group)
            ends = (lengths - counts)[rows] + tokens
            launches.append(_longest_first(rows, tokens, ends, kind))
    return launches


def plan_texts(lengths: Sequence[int], heads: Heads, tiles: Tiles) -> list[Blocks]:
    """The launch for whole texts, each of which sees all of itself."""
    counts = np.asarray(lengths)
    rows, tokens = cut(np.arange(len(counts)), counts, tiles.queries // heads.group)
    return [_longest_first(rows, tokens, counts[rows], Kind.LONG)]


def cut(rows: np.ndarray, counts: np.ndarray, each: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut the tokens of some rows into blocks of `each`: -> the row and the first token of every block."""
    blocks = -(-counts[rows] // each)
    firsts = np.arange(blocks.sum()) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    return np.repeat(rows, blocks).astype(np.int32), (firsts * each).astype(np.int32)


def _longest_first(rows: np.ndarray, tokens: np.ndarray, work: np.ndarray, kind: Kind) -> Blocks:
    """Begin with the blocks that read most keys: a long one that starts last would be waited for."""
    order = np.argsort(-work, kind="stable")
    return Blocks(rows[order], tokens[order], kind)


def split_rows(rows: np.ndarray, lengths: np.ndarray, heads: Heads, processors: int) -> Blocks:
    """Make a block of each of these rows; those whose keys are split, because they are many, come first."""
    keys = lengths[rows]
    pieces = np.zeros_like(lengths)
    pieces[rows] = -(-keys // keys_of_split(int(keys.sum()), len(rows), heads, processors))
    order = rows[np.argsort(pieces[rows] == 1, kind="stable")]
    entries, split = cut(order, pieces, 1)
    words = split | (pieces[entries] - 1 << 16).astype(np.int32)
    return Blocks(entries, words, Kind.SHORT, int(pieces[pieces > 1].sum()))


def keys_of_split(total: int, rows: int, heads: Heads, processors: int) -> int:
    """The most keys of a split of short rows that see so many keys together.

    They are so many that nearly every multiprocessor has two programs. Where rows alone are as many, twice as
    many: a program that reads while others have ended is faster.
    """
    enough = enough_rows(heads, processors)
    return max(least_keys(heads), -(-total * (2 if rows >= enough else 1) // enough))


def enough_rows(heads: Heads, processors: int) -> int:
    """The rows that give nearly every multiprocessor two programs.

    An H100 read the keys of 256 programs on 132 multiprocessors at 2.86 TB/s, and of twice as many at 2.70.
    """
    return max(1, 15 * processors // 8 // heads.keys)


def least_keys(heads: Heads) -> int:
    """The keys of a split, at least; a latent is computed for many heads."""
    return LEAST_KEYS // 4 if heads.made else LEAST_KEYS


@dataclass(frozen=True, slots=True)
class Room:
    """One launch with room for the blocks of any step up to some size; a step fills it up with -1."""

    size: int
    kind: Kind
    split: int = 0
    """The number of entries at the beginning that may be splits."""


def plan_room(card: Card, key: PlanKey, tokens: int, rows: int, longest: int) -> list[tuple[Room, Tiles]]:
    """The launches that take the blocks of any step of up to so many tokens of so many rows."""
    heads, _, paged = key
    tiles = _tiles(card, key)
    if paged:
        rooms = room_for_prompts_and_decodes(tokens, rows, longest, heads, tiles, card.processors)
    else:
        rooms = [room_for_large_blocks(tokens, min(rows, tokens), tiles[Kind.LONG].queries // heads.group)]
    return [(room, tiles[room.kind]) for room in rooms]


def room_for_prompts_and_decodes(
    tokens: int, rows: int, longest: int, heads: Heads, tiles: Mapping[Kind, Tiles], processors: int
) -> list[Room]:
    """The room that steps of up to so many tokens of so many rows need; no sequence is longer than `longest`.

    A short row is one block. The others have a token more at least, and end with a block that is not full.
    What is split into pieces of a size gives fewer than twice as many as there are such sizes in it.
    """
    few, enough = min(tokens, rows), enough_rows(heads, processors)
    size = few + min(enough, few * (-(-longest // least_keys(heads)) - 1))
    least = max(1, SHORT_ROWS // heads.group) + 1
    each = tiles[Kind.LONG].queries // heads.group
    rooms = [
        Room(size, Kind.SHORT, min(size, 2 * enough) if size > few else 0),
        room_for_large_blocks(tokens, min(rows, tokens // least), each),
    ]
    if heads.made and tokens >= LEAST_MADE:
        each, most = tiles[Kind.MADE].queries, min(rows, tokens // LEAST_MADE)
        rooms.append(room_for_large_blocks(tokens, most, each, Kind.MADE))
    return [room for room in rooms if room.size]


def room_for_large_blocks(tokens: int, rows: int, each: int, kind: Kind = Kind.LONG) -> Room:
    return Room((tokens + rows * (each - 1)) // each, kind)


class PlannedLayout:
    """CUDA's `worker.tables.positions.LayOut`, which sends plans of attention along.

    Which kinds of heads a model has it learns from the first step, whose layers plan for themselves.
    """

    def __init__(self, card: Card) -> None:
        self._card = card
        self._last: Plan = {}
        """The plan of the step before, to which layers have added the kinds of heads that it lacked."""

    def __call__(self, columns: Columns, slots: Slots, packet: Packet) -> Callable[[], StepTokens]:
        finish = lay_out(columns, slots, packet)
        plan = self._plan(columns.counts, columns.ends, packet.ints)

        def finish_with_plan() -> StepTokens:
            ids, context = finish()
            self._last = plan
            for each in (context, *context.others):
                each.plan = plan
            return ids, context

        return finish_with_plan

    @property
    def kinds(self) -> list[PlanKey]:
        """The kinds of heads that steps have shown so far."""
        return list(self._last)

    def room_for(self, rows: int, longest: int, target: torch.device) -> Plan:
        """Room for the plan of so many single tokens, which a kernel makes on the device."""
        plan: Plan = {}
        for key in self._last:
            room, tiles = plan_room(self._card, key, rows, rows, longest)[0]
            entries = torch.zeros(room.size, dtype=torch.int32, device=target)
            plan[key] = [Launch(entries, entries.clone(), tiles, room.kind, room.split)]
        return plan

    def _plan(self, counts: Sequence[int], ends: Sequence[int], send: Callable[[np.ndarray], Tensor]) -> Plan:
        return {
            key: [
                Launch.of(blocks, tiles, send) for blocks, tiles in plan_step(self._card, key, counts, ends)
            ]
            for key in self._last
        }
