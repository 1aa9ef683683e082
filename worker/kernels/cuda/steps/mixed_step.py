"""Steps of any rows where graphs read them: one of a few sizes holds every smaller step.

The host sends rows and the plan of attention, both filled up; the positions and places of tokens, whose
blocks the device alone knows, are laid out in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
from torch import Tensor

from models.state_rows import STATE_COLUMNS
from worker.kernels.cuda.attention_plan import Launch, Plan, PlanKey, Room, plan_room, plan_step
from worker.kernels.cuda.capabilities import Card, Tiles
from worker.kernels.cuda.products.adapters import on_device
from worker.kernels.cuda.steps.layout_kernels import StepTensors, lay_out_any_rows, unread_step
from worker.steps.compute import UnreadStep, Unrecordable
from worker.tables.adapter_rows import AdapterReads, numbers_of
from worker.tables.positions import Columns, StepTokens, TypeReads
from worker.tables.slots import Slots
from worker.tables.staging import Column, Packet, columns_of
from worker.tables.state_rows import StateReads

MOST_ROWS = 256
MOST_SAMPLES = 64
"""The most rows whose tokens a graph chooses. Their logits hardly take longer than those of one row, for
which the whole matrix is read, too."""


class MixedStep:
    """The place on the device of steps with up to so many tokens."""

    def __init__(
        self,
        tokens: int,
        samples: int,
        card: Card,
        slots: Slots,
        kinds: Sequence[PlanKey],
        buffer: Tensor,
        largest: Sequence[StepTensors],
    ) -> None:
        """`samples`: the most rows whose tokens a graph chooses; `kinds` of heads that the model has.

        `largest`: the tensors of the largest step, of which smaller ones take the beginning, for each group
        of layers.
        """
        self._card, self._slots, self._buffer = card, slots, buffer
        rows = min(tokens, len(largest[0].block_table))
        self.rows, self.samples = rows, min(samples, rows, MOST_SAMPLES)
        self._rooms: dict[PlanKey, list[tuple[Room, Tiles]]] = {
            key: plan_room(card, key, tokens, rows, slots.max_len) for key in kinds
        }
        sizes = [room.size for room, _ in chain(*self._rooms.values())]
        self._fixed = [rows, rows + 1, rows, tokens, self.samples, self.samples]
        self._fixed += [] if slots.paged else [tokens]
        adapts, has_states = "adapters" in slots.rooms, "states" in slots.rooms
        self._fixed += [tokens] if adapts else []
        self._fixed += [STATE_COLUMNS * rows] if has_states else []
        self._lengths = self._fixed + [size for size in sizes for _ in range(2)]
        if 2 * sum(self._lengths) > len(buffer):
            raise Unrecordable("its plans of attention have no room in a form")
        columns = columns_of(buffer, self._lengths)
        self._held, self._starts, self._ends, self._row_of = columns[:4]
        self.last, self.sampling = columns[4:6]
        """The last tokens of the rows that sample, and their slots."""
        further = iter(columns[6:])
        self._types = None if slots.paged else next(further)
        self._adapters = next(further) if adapts else None
        self.adapters = on_device(self._adapters)
        """The adapters of the step's tokens, if sequences may have some."""
        self._states = next(further).view(-1, rows) if has_states else None
        self._blocks = list(further)
        self._tensors = [each.first(tokens, rows) for each in largest]
        self._ids = self._tensors[0].ids
        self._context = self._open_context()

    def clear(self) -> None:
        """Bring a step without rows to the device."""
        self._buffer.fill_(-1)
        self._held.fill_(self._slots.dummy)
        self._starts.zero_()
        self._ends.zero_()
        self.last.zero_()
        self.sampling.fill_(self._slots.dummy)
        for each in (self._types, self._adapters, self._states):
            if each is not None:
                each.zero_()

    def lay_out(self, *, adapted: bool = False) -> StepTokens:
        """Lay out the tokens of the step that is there, some of which may have adapters."""
        lay_out_any_rows(self._held, self._starts, self._ends, self._row_of, self._slots, self._tensors)
        if self._types is not None:
            self._context.token_types = self._types.long()
        self._context.adapters = self.adapters if adapted else None
        return self._ids, self._context

    def stage(self, columns: Columns, sampling: Sequence[int], packet: Packet) -> Callable[[], StepTokens]:
        """Begin a packet with a step that this place has room for.

        `sampling`: the rows whose tokens a graph chooses. What is returned is that of a `LayOut`.
        """
        count, rows = columns.query_starts[-1], len(columns.slots)
        dummy, types = self._slots.dummy, columns.find(TypeReads)
        adapters = columns.find(AdapterReads) or AdapterReads((), count)
        states = columns.find(StateReads) or StateReads(())
        filled: list[tuple[Sequence[int] | np.ndarray, int]] = [
            (columns.slots, dummy),
            (columns.query_starts, count),
            (columns.ends, 0),
            (np.repeat(np.arange(rows), columns.counts), -1),
            ([columns.query_starts[row + 1] - 1 for row in sampling], 0),
            ([columns.slots[row] for row in sampling], dummy),
            *([] if self._slots.paged else [(types.types if types else [], 0)]),
            *([] if self._adapters is None else [(numbers_of(adapters.runs, count)[:count], 0)]),
            *([] if self._states is None else [(states.words(self.rows, dummy), 0)]),
            *((blocks, -1) for blocks in self._plan_step(columns)),
        ]
        packet.begin_form(
            self._buffer,
            [Column(*each, length) for each, length in zip(filled, self._lengths, strict=True)],
        )
        return lambda: (self._ids[:count], self._context)

    def _open_context(self) -> UnreadStep:
        """The context that layers read, with launches of attention whose blocks come with each step."""
        places = iter(self._blocks)
        plan: Plan = {
            key: [
                Launch(next(places), next(places), tiles, room.kind, room.split, padded=True)
                for room, tiles in rooms
            ]
            for key, rooms in self._rooms.items()
        }
        starts, ends = self._starts, self._ends
        return unread_step(self._tensors, starts, ends, self._slots.block_size, plan, self._states)

    def _plan_step(self, columns: Columns) -> list[np.ndarray]:
        """The rows and the tokens of the blocks of each launch."""
        planned: list[np.ndarray] = []
        none = np.empty(0, np.int32)
        for key, rooms in self._rooms.items():
            step = plan_step(self._card, key, columns.counts, columns.ends)
            own = [blocks for blocks, _ in step]
            for room, _ in rooms:
                blocks = next((each for each in own if each.kind is room.kind), None)
                planned += [none, none] if blocks is None else [blocks.rows, blocks.tokens]
        return planned
