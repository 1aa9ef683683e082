"""The blocks of queries of a step: which program computes which tokens of which row. On the host, in numpy.

A step of decoding rows and prompts makes two launches: blocks of few rows whose keys are split over programs,
and large ones. One size for both would waste most of either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from worker.kernels.cuda.tiles import LEAST_KEYS, SHORT_ROWS, Tiles

MOST_SPLITS = 32


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a layer that this rank holds."""

    queries: int
    keys: int
    dim: int
    latent: bool = False
    """Whether these are parts of the heads of latent attention, whose cached rows are `dim` wide."""
    made: int = 0
    """The numbers of a key or a value that is made of a latent, whichever is wider."""

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.queries // self.keys


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row of the step, its tokens in all, and the most tokens that such rows can have in any step."""

    row: int
    total: int
    most: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """One launch."""

    rows: np.ndarray  # [N] int32: the row of the step that each block belongs to
    tokens: np.ndarray  # [N] int32: the first of its tokens, counted from those of the row
    splits: int
    short: bool
    prompt: Prompt | None = None
    """The one row of these blocks, if keys and values of all heads are made of its latents."""

    @property
    def size(self) -> int:
        return len(self.rows)


def plan_prompts_and_decodes(
    new: Sequence[int],
    total: Sequence[int],
    heads: Heads,
    short: Tiles,
    long: Tiles,
    processors: int,
    others: np.ndarray | None = None,
) -> list[Blocks]:
    """Launches for rows with `new` tokens at the end of `total`, on a card with so many multiprocessors.

    `others` [B]: whether a row is left out; None: all are planned.
    """
    counts, lengths = np.asarray(new), np.asarray(total)
    few = (counts * heads.group <= SHORT_ROWS) | (counts == 1)
    many = ~few
    if others is not None:
        few, many = few & ~others, many & ~others
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


@dataclass(frozen=True, slots=True)
class Room:
    """One launch with room for the blocks of any step up to some size; a step fills it up with -1."""

    size: int
    splits: int
    short: bool


def room_for_prompts_and_decodes(
    tokens: int, rows: int, longest: int, heads: Heads, long: Tiles, processors: int
) -> list[Room]:
    """The room that steps of up to so many tokens of so many rows need; no sequence is longer than `longest`.

    A short row is one block. The others have a token more at least, and end with a block that is not full.
    """
    few = min(tokens, rows)
    splits = _splits(few * heads.keys, longest, processors)
    least = max(1, SHORT_ROWS // heads.group) + 1
    large = _room_for_large_blocks(tokens, min(rows, tokens // least), long.queries // heads.group)
    return [Room(few, splits, short=True), *([large] if large.size else [])]


def room_for_texts(tokens: int, rows: int, heads: Heads, tiles: Tiles) -> list[Room]:
    return [_room_for_large_blocks(tokens, min(rows, tokens), tiles.queries // heads.group)]


def _room_for_large_blocks(tokens: int, rows: int, each: int) -> Room:
    return Room((tokens + rows * (each - 1)) // each, splits=1, short=False)


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
    """The power of two that gives every multiprocessor two programs, as far as keys are many enough."""
    splits = 1
    while splits < MOST_SPLITS and 2 * splits * LEAST_KEYS <= longest and programs * splits < 2 * processors:
        splits *= 2
    return splits
