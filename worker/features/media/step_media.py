"""The media of steps: what the tower makes of each item, held by number, and what a step reads of that.

It is planned with the step, from the places of items in its sequences, and shown to the model in the step's
context. Every rank of the first stage encodes all items; the others know their places only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import inf, prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from models.context import ForwardContext, MediaRows
from models.media.item import CLIENT_MADE, AudioProcessor
from models.media.positions import AXES
from models.media.registry import find_media, make_processor
from models.towers.tower import (
    InLayers,
    Tower,
    TowerInput,
    advance,
    count_layers,
    finish,
    sees_media,
    sees_prompts,
)
from worker.buffers import Buffer
from worker.features.media.media_memory import MOST_PATCHES
from worker.features.media.placed_media import PlacedMedia
from worker.protocol import Encode, NewSeq, StepInput
from worker.tables.positions import Columns, Read
from worker.tables.slots import Slots
from worker.tables.staging import Packet

_SHORTEST_SOUND = 1600
"""The samples of a sound that every model hears."""

with warnings.catch_warnings():  # torch warns once of bytes that are read only: nothing writes to pixels
    warnings.simplefilter("ignore")
    torch.frombuffer(b"pixels", dtype=torch.uint8)


@dataclass(slots=True)
class MediaRead:
    """The embeddings and positions that a step reads because of its media, on the host."""

    tokens: list[np.ndarray]  # together [M]: the tokens of the step in whose place embeddings are put
    pieces: list[Tensor]  # together [M, (1 + levels) * H]; nothing where no tower is held
    levels: int
    last: np.ndarray | None = None  # [T]: the last position that a token sees
    whole: np.ndarray | None = None  # [T]: whether it sees all up to there, windows or not
    axes: np.ndarray | None = None  # [3, T]

    in_mixed: bool = False

    @property
    def in_single(self) -> bool:
        """Whether each token has one position on all axes, and nothing else because of media."""
        return not self.tokens and self.axes is not None and bool((self.axes == self.axes[0]).all())

    def stage(self, packet: Packet) -> Callable[[ForwardContext], None]:
        """Send the numbers; the returned function shows all of it to a model, once they are there."""
        tokens = packet.ints(np.concatenate(self.tokens)) if self.pieces else None
        arrays, only_shifts = (self.last, self.whole, self.axes), self.in_single
        last, whole, axes = [None if each is None else packet.ints(each.ravel()) for each in arrays]

        def show(context: ForwardContext) -> None:
            for each in (context, *context.others):
                each.last, each.whole = last, None if whole is None else whole.bool()
            if axes is not None and only_shifts:  # in place, where recordings of small steps read them
                context.positions.copy_(axes.view(3, -1)[0])
            elif axes is not None:
                context.axes = axes.view(3, -1).long()
            if tokens is not None:
                rows, *deeper = torch.cat(self.pieces).chunk(1 + self.levels, dim=1)
                context.media = MediaRows(tokens.long(), rows, tuple(deeper))

        return show


@dataclass(slots=True)
class _Begun:
    """The encoding of an item, of whose layers some are left."""

    computation: InLayers[list[Tensor]]
    left: int


class StepMedia:
    """Encodes the items that steps bring, and reads them for the steps that need them."""

    def __init__(
        self,
        tower: Tower | None,
        slots: Slots,
        target: torch.device,
        dtype: torch.dtype,
        *,
        most: int,
        encodes: bool,
    ) -> None:
        """`tower`: None, if embeddings of prompts are all that comes. `most`: the embeddings that may be held
        at a time. `encodes`: whether this rank has the tower."""
        self._tower, self._slots, self._target, self._dtype = tower, slots, target, dtype
        self._levels = 0 if tower is None else tower.levels
        self._most, self._encodes = most, encodes
        self._rows: dict[int, Tensor] = {}
        """What the tower made of each item [embeddings, (1 + levels) * H], by its number."""
        self._sizes: dict[int, int] = {}
        """The embeddings of each of these, and of those of whose tower some layers are computed:"""
        self._begun: dict[int, _Begun] = {}
        self._sees_media = sees_media(tower)
        self.sees_prompts = sees_prompts(tower)
        self._on_axes = bool(getattr(tower, "three_axes", False))
        self._placed: dict[int, PlacedMedia] = {}
        """The media of slots whose sequences have some."""

    def update(self, step: StepInput) -> None:
        """Drop the items that a step forgets, or all behind a failed one, then encode those it brings."""
        changes = step.encode or step.partly or step.forget or step.fresh
        if not (changes and self._encodes):
            return
        if step.fresh:
            for held in (self._rows, self._sizes, self._begun):
                held.clear()
        brought, forgotten = {item.number for item in step.encode}, set(step.forget)
        unknown = {number for number in forgotten if number not in self._sizes}
        twice = {number for number in brought - forgotten if number in self._sizes}
        if unknown or twice:
            raise ValueError(f"step {step.number} forgets items {[*unknown]} and brings {[*twice]} again")
        for number in forgotten:
            del self._sizes[number]
            self._rows.pop(number, None)
            self._begun.pop(number, None)
        self._sizes |= {item.number: item.embeddings for item in step.encode}
        if (held := sum(self._sizes.values())) > self._most:
            raise ValueError(f"step {step.number}: {held} embeddings of media, and {self._most} have room")
        self._encode(step)

    def _encode(self, step: StepInput) -> None:
        for item in step.encode:
            if item.kind in CLIENT_MADE:
                rows = torch.frombuffer(item.pixels.data, dtype=torch.float32).view(item.embeddings, -1)
                self._rows[item.number] = rows.to(self._target, self._dtype, copy=True)
        pictures = [item for item in step.encode if item.kind not in CLIENT_MADE]
        for items in _groups([item for item in pictures if item.number not in step.partly]):
            made = finish(self._computation(items))
            for item, rows in zip(items, made, strict=True):
                self._rows[item.number] = rows.clone() if len(items) > 1 else rows  # each is freed alone
        for item in pictures:
            if item.number in step.partly:
                self._begun[item.number] = _Begun(self._computation([item]), count_layers(self._tower))
        for number, layers in step.partly.items():
            self._go_on(number, layers)

    def _computation(self, items: Sequence[Encode]) -> InLayers[list[Tensor]]:
        if self._tower is None:
            raise ValueError("a step brings pictures, and the model has no tower")
        return self._tower.encode([self._on_device(item) for item in items])

    def _go_on(self, number: int, layers: int) -> None:
        """Compute so many layers more of an item; with the last one also what comes behind the layers."""
        begun = self._begun[number]
        begun.left -= layers
        if (made := advance(begun.computation, layers if begun.left > 0 else inf)) is not None:
            [self._rows[number]] = made
        if begun.left <= 0:
            del self._begun[number]

    @torch.inference_mode()
    def warm_up(self, folder: Path) -> None:
        """Encode what the smallest picture becomes, for which a device may have to compile kernels."""
        files = find_media(folder) if self._encodes and self._tower is not None else None
        if files is None or self._tower is None:
            return
        processor = make_processor(files)
        if isinstance(processor, AudioProcessor):
            item = processor.prepare_audio([np.zeros(_SHORTEST_SOUND, np.float32)])
        else:
            picture = import_module("PIL.Image").new("RGB", (1, 1))  # imported where kernels are compiled
            item = processor.prepare(picture)
        encode = Encode(0, item.kind, item.shape, item.grid, item.embeddings, Buffer(item.pixels))
        finish(self._computation([encode]))

    def admit(self, new: NewSeq) -> None:
        """Note the places of a sequence's media."""
        slots, slot = self._slots, new.slot
        self._placed.pop(slot, None)
        if new.media:
            self._placed[slot] = placed = PlacedMedia.of(new.media, on_axes=self._on_axes)
            slots.shift[slot] = placed.shift
            if any(place.kind == "rows" for place in new.media):
                slots.without_tokens[slot] = new.prompt_len

    def read(self, columns: Columns) -> Sequence[Read]:
        """Tell what a step reads of the media of its sequences."""
        if not (self._placed or self.sees_prompts):
            return ()
        read = self._find(columns)
        return [read] if read.tokens or read.axes is not None or read.last is not None else ()

    def _find(self, columns: Columns) -> MediaRead:
        slots, read = self._slots, MediaRead([], [], self._levels)
        if self._on_axes and (shifts := slots.shift[columns.slots]).any():
            read.axes = np.stack([_positions(columns) + np.repeat(shifts, columns.counts)] * AXES)
        for row, slot in enumerate(columns.slots):
            placed, start = self._placed.get(slot), columns.starts[row]
            end, begin = columns.ends[row], columns.query_starts[row]
            if self.sees_prompts and start < slots.prompt_len[slot]:
                self._show_prompt(read, columns, begin, int(slots.prompt_len[slot]) - start)
            if placed is None or start >= placed.end:
                continue
            if placed.axes is not None:
                read.axes = np.stack([_positions(columns)] * AXES) if read.axes is None else read.axes
                known = placed.axes[:, start:end]
                read.axes[:, begin : begin + known.shape[1]] = known
            first, stop = np.searchsorted(placed.positions, (start, end)).tolist()
            if first == stop:
                continue
            read.tokens.append(placed.positions[first:stop] + (begin - start))
            read.pieces += self._pieces(placed, first, stop)
            if self._sees_media and not self.sees_prompts:
                read.last = _positions(columns) if read.last is None else read.last
                read.last[read.tokens[-1]] = placed.ends[first:stop]
        return read

    def _show_prompt(self, read: MediaRead, columns: Columns, begin: int, count: int) -> None:
        """Let the tokens [begin, begin + count) of the step, the rest of a prompt, see each other."""
        if read.last is None or read.whole is None:
            read.last = _positions(columns)
            read.whole = np.zeros(len(read.last), bool)
        read.last[begin : begin + count] = read.last[begin + count - 1]
        read.whole[begin : begin + count] = True

    def _pieces(self, placed: PlacedMedia, first: int, stop: int) -> Iterator[Tensor]:
        """The rows of a sequence's embeddings [first, stop), from the items to which they belong."""
        if not self._encodes:
            return
        for item, start, end in zip(placed.items, placed.firsts, placed.firsts[1:], strict=False):
            if start >= stop or end <= first:
                continue
            rows = self._rows.get(item.number)
            if rows is None or len(rows) != end - start:
                raise ValueError(
                    f"a step reads {end - start} embeddings of item {item.number}, of which there are "
                    f"{0 if rows is None else len(rows)}"
                )
            yield rows[max(0, first - start) : stop - start]

    def _on_device(self, item: Encode) -> TowerInput:
        if item.kind == "audio":
            features = torch.frombuffer(item.pixels.data, dtype=torch.float32).view(item.shape[:2])
            heard = features.to(self._target, self._dtype, copy=True)
            return TowerInput(item.kind, heard, item.grid, item.embeddings)
        pixels = torch.frombuffer(item.pixels.data, dtype=torch.uint8).view(item.shape)
        return TowerInput(item.kind, pixels.to(self._target), item.grid, item.embeddings)


def _positions(columns: Columns) -> np.ndarray:
    """The position of each token [T]."""
    return np.concatenate([np.arange(*span) for span in zip(columns.starts, columns.ends, strict=True)])


def _groups(items: Sequence[Encode]) -> Iterator[list[Encode]]:
    """Items that are encoded together."""
    group: list[Encode] = []
    patches = 0
    for item in items:
        patches += prod(item.grid)
        if group and patches > MOST_PATCHES:
            yield group
            group, patches = [], prod(item.grid)
        group.append(item)
    if group:
        yield group
