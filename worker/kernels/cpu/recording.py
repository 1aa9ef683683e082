"""Small steps without Python: the calls of kernels are recorded once, and replayed by one call of C.

Steps of up to MOST_TOKENS tokens call the same kernels with the same arguments as long as all tensors stay
where they are: `Layout` puts inputs into fixed memory, and results have room for the most tokens. Only two
arguments differ, the numbers of tokens and of rows; which words of the calls they are shows when steps of
other sizes are written down, without computing them. So steps of all sizes have one recording. A model that
leaves anything to torch, reads values or lengths on the host, or calls kernels that differ in more is not
recorded, and runs as it is.
"""

from __future__ import annotations

import logging
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.context import AdapterRows, ForwardContext, StateRows, context, use_context
from models.model import Forward
from models.state_rows import STATE_COLUMNS
from worker.host.memory import huge_pages
from worker.kernels.cpu.library import FLOAT, Kernel, Library
from worker.kernels.cpu.tensors import Memory, allocated_by
from worker.steps.compute import Unrecordable, unread
from worker.tables.adapter_rows import AdapterReads
from worker.tables.positions import Columns, Show, StepTokens, blocks_of
from worker.tables.slots import Slots
from worker.tables.staging import Packet

logger = logging.getLogger(__name__)

MOST_TOKENS = 1024
"""The tokens of the largest small step: in larger ones, Python takes little time beside the computing."""
RESULT_BYTES = 1 << 30
"""Room for the results that a step needs at the same time. Memory is committed as it is written."""

_SIZES = ((1, 1), (3, 2), (MOST_TOKENS, MOST_TOKENS - 1))
"""Tokens and rows of the steps that are written down: the least, and two in which all numbers differ."""


_NO_ROOMS: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors that a model reads of a step with T tokens of B sequences, and their addresses."""

    ids: Tensor  # [T] int64, as are the next two
    positions: Tensor
    slot_mapping: Tensor
    query_starts: Tensor  # [B + 1] int32
    kv_lens: Tensor  # [B] int32
    block_table: Tensor  # [B, blocks] int32
    state_table: Tensor | None  # [STATE_COLUMNS, B] int32; None: no layer has states
    addresses: tuple[int, ...]
    others: list[Inputs]
    """The same with the slot mapping and the block table of each other group of layers."""
    source: tuple[Tensor, Tensor, Tensor] | None = None
    """What layers of cross-attention read: lengths [B], the block table [B, blocks], last positions [T]."""

    @classmethod
    def make(
        cls, tokens: int, rows: int, blocks: int, groups: int = 1, rooms: Mapping[str, int] = _NO_ROOMS
    ) -> Inputs:
        """`rooms`: those of `Slots`."""
        ids, positions = torch.zeros(2, tokens, dtype=torch.int64)
        query_starts, kv_lens = torch.zeros(rows + 1, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
        state_table = torch.zeros(STATE_COLUMNS, rows, dtype=torch.int32) if "states" in rooms else None
        made = [
            cls._of(
                *(ids, positions, torch.zeros(tokens, dtype=torch.int64), query_starts, kv_lens),
                torch.zeros(rows, blocks, dtype=torch.int32),
                state_table=state_table,
            )
            for _ in range(groups)
        ]
        made[0].others.extend(made[1:])
        if not (of_source := rooms.get("source")):
            return made[0]
        table, lengths = torch.zeros(rows, of_source, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
        return replace(made[0], source=(lengths, table, torch.zeros(tokens, dtype=torch.int32)))

    def first(self, tokens: int, rows: int) -> Inputs:
        """The inputs of a smaller step at the beginning of the same memory."""
        source = None
        if self.source:
            lengths, table, last = self.source
            source = lengths[:rows], table[:rows], last[:tokens]
        by_token = (each[:tokens] for each in (self.ids, self.positions, self.slot_mapping))
        return self._of(
            *(*by_token, self.query_starts[: rows + 1], self.kv_lens[:rows]),
            self.block_table[:rows],
            state_table=None if self.state_table is None else self.state_table[:, :rows],
            others=[each.first(tokens, rows) for each in self.others],
            source=source,
        )

    def step_tokens(self, block_size: int, counts: list[int], ends: list[int]) -> StepTokens:
        """The ids, and the context of a step in which sequences get `counts` tokens and then have `ends`."""
        step = ForwardContext(
            positions=self.positions,
            query_starts=self.query_starts,
            kv_lens=self.kv_lens,
            block_table=self.block_table,
            slot_mapping=self.slot_mapping,
            block_size=block_size,
            query_lens_host=counts,
            kv_lens_host=ends,
        )
        if self.others:
            step.others = [each.step_tokens(block_size, counts, ends)[1] for each in self.others]
        if self.state_table is not None:
            step.states = StateRows(self.state_table, [])
        if self.source:
            lengths, table, last = self.source
            step.source = replace(step, kv_lens=lengths, block_table=table, last=last)
        return self.ids, step

    @classmethod
    def _of(
        cls,
        *tensors: Tensor,
        state_table: Tensor | None,
        others: Sequence[Inputs] = (),
        source: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Inputs:
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        return cls(*tensors, state_table=state_table, addresses=addresses, others=[*others], source=source)


class Layout:
    """The CPU's `worker.tables.positions.LayOut`. It writes where models read, so it needs no packet."""

    def __init__(self, library: Library, slots: Slots) -> None:
        self.slots = slots
        self.adapts = "adapters" in slots.rooms
        """Whether sequences may have adapters."""
        self._run = library.unrecorded("lay_out", quick=True)
        self._recorded = library.function("lay_out")
        self._tables = [table.data_ptr() for table in slots.block_tables]
        self._adapted_tokens = torch.zeros(MOST_TOKENS, dtype=torch.int32)
        self._adapter_runs = torch.zeros(1 + 3 * MOST_TOKENS, dtype=torch.int32)
        sizes = slots.most_blocks, slots.groups, slots.rooms
        largest = Inputs.make(MOST_TOKENS, MOST_TOKENS, *sizes)
        self.fixed_inputs = lru_cache(maxsize=256)(largest.first)
        """The function from numbers of tokens and rows to the inputs of all small steps of that size."""

    @cached_property
    def results(self) -> Tensor:
        """The memory for results of recorded calls. All recordings write to it, one after the other.

        A system that promises no more memory than it has may refuse: OSError.
        """
        return huge_pages(RESULT_BYTES)

    def small_batch(self, tokens: int, rows: int, *, adapted: bool = False) -> StepTokens:
        """The ids and the context of a small step: any values, and nothing in the lists of the host.

        `adapted`: whether some tokens have adapters.
        """
        ids, step = self.fixed_inputs(tokens, rows).step_tokens(self.slots.block_size, [], [])
        if adapted:
            step.adapters = AdapterRows(self._adapted_tokens[:tokens], self._adapter_runs, [])
        return ids, step

    def record(self, rows: int, columns: Tensor, merged: Tensor) -> None:
        """Record the layout of a small step, with its columns and the places of what is merged."""
        self._call(self._recorded, columns.data_ptr(), rows, self.fixed_inputs(1, rows), merged.data_ptr())

    def __call__(self, columns: Columns, slots: Slots, packet: Packet) -> Callable[[], StepTokens]:
        shows = [read.stage(packet) for read in columns.reads] if columns.reads else ()
        return partial(self._lay_out, columns, shows)

    def _lay_out(self, columns: Columns, shows: Sequence[Show]) -> StepTokens:
        slots, rows, tokens = self.slots, len(columns.slots), columns.query_starts[-1]
        if small := tokens <= MOST_TOKENS:
            inputs = self.fixed_inputs(tokens, rows)
        else:
            inputs = Inputs.make(tokens, rows, blocks_of(columns, slots), slots.groups)
        table = array("i", columns.slots + columns.starts + columns.counts)
        self._call(self._run, table.buffer_info()[0], rows, inputs, None)
        ids, step = inputs.step_tokens(slots.block_size, columns.counts, columns.ends)
        if shows and small and columns.find(AdapterReads):
            step.adapters = AdapterRows(self._adapted_tokens[:tokens], self._adapter_runs, [])
        for show in shows:
            show(step)
        return ids, step

    def _call(self, run: Kernel, table: int, rows: int, inputs: Inputs, merged: int | None) -> None:
        """Write the inputs of a step by the addresses of its columns and of the places that are merged."""
        slots = self.slots
        for group, own in enumerate((inputs, *inputs.others)):
            run(
                *(table, rows, slots.tokens.data_ptr(), slots.width, self._tables[group]),
                *(slots.most_blocks, slots.block_size if slots.paged else 0),
                *(*own.addresses, own.block_table.shape[1], merged),
            )


def recorded(forward: Forward, library: Library, layout: Layout) -> Forward:
    """A model's forward pass with small steps replayed; called under `use_context`, as the model's own is."""
    try:
        return _Replayed(forward, library, layout)
    except Exception as reason:  # of the model's own code, too: it may never get a step of so many tokens
        logger.debug("small steps are not replayed: %s", reason)
        return forward


class _Replayed:
    """A forward pass whose small steps are replayed: those without adapters, and those with some."""

    def __init__(self, forward: Forward, library: Library, layout: Layout) -> None:
        self._forward = forward
        self._fixed_ids = layout.fixed_inputs(1, 1).ids.data_ptr()

        given = partial(_compute, forward), library, layout
        self._plain = self._adapted = Recording(*given, layout.small_batch)
        if layout.adapts:
            self._adapted = Recording(*given, partial(layout.small_batch, adapted=True))

    def __call__(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        step = context()
        if stream is not None or step.token_types is not None or ids.data_ptr() != self._fixed_ids:
            return self._forward(ids, positions, stream)
        if step.media is not None or step.axes is not None or step.last is not None or step.seen:
            return self._forward(ids, positions, stream)
        if step.source is not None and step.source.queries is not None:
            return self._forward(ids, positions, stream)
        recording = self._plain if step.adapters is None else self._adapted
        tokens = ids.shape[0]
        recording.replay(tokens, step.kv_lens.shape[0])
        if recording.streams:
            step.streams = [stream[:tokens].clone() for stream in recording.streams]
        if tokens != recording.first.shape[0]:
            recording.first = recording.result[:tokens]
        return recording.first.clone()  # the next step writes to the same memory


Computed = tuple[Tensor, Sequence[Tensor]]
"""The type of what a recorded function computes: its result, and the residual streams that it gives out."""


def _compute(forward: Forward, ids: Tensor, step: ForwardContext) -> Computed:
    result = forward(ids, step.positions, None)
    return result, step.streams or ()


class Recording:
    """The recorded calls of small steps of any number of tokens and rows."""

    def __init__(
        self,
        compute: Callable[[Tensor, ForwardContext], Computed],
        library: Library,
        layout: Layout,
        batch: Callable[[int, int], StepTokens],
    ) -> None:
        """Record what `compute` calls for the small steps that `batch` makes of some tokens and rows."""
        least, few, most = (
            _write_down(compute, library, layout.results, batch(*size), *size) for size in _SIZES
        )
        if any((each.entries, each.row_bytes) != (most.entries, most.row_bytes) for each in (least, few)):
            raise Unrecordable("it calls other kernels for another number of tokens or rows")
        self._replay = library.unrecorded("replay")
        self._words, others = np.array(most.words), np.array(few.words)  # int64
        is_tokens = (others == few.tokens) & (self._words == most.tokens)
        is_rows = (others == few.rows) & (self._words == most.rows)
        if not np.array_equal(others != self._words, is_tokens | is_rows):
            raise Unrecordable("its calls differ in more than the numbers of tokens and rows")
        of_tokens, of_rows = np.flatnonzero(is_tokens), np.flatnonzero(is_rows)
        self._places = np.concatenate([of_tokens, of_rows])  # int64
        calls = self._words.ctypes.data, len(most.entries)
        self._calls = *calls, self._places.ctypes.data, len(of_tokens), len(of_rows)
        self.streams = most.streams
        self.result = self.first = most.hidden
        """The memory to which each step writes, with rows for the most tokens; and a view of the rows of the
        last step, which the next one of its size uses again."""

    def replay(self, tokens: int, rows: int) -> None:
        self._replay(*self._calls, tokens, rows)


@torch.inference_mode()
def _write_down(
    compute: Callable[[Tensor, ForwardContext], Computed],
    library: Library,
    results: Tensor,
    batch: StepTokens,
    tokens: int,
    rows: int,
) -> _Script:
    ids, step = batch
    step = unread(step)
    script = _Script(tokens, rows, Memory(results))
    with use_context(step), library.record_to(script.call), allocated_by(script.empty), _OpWatcher():
        script.hidden, streams = compute(ids, step)
    script.streams = list(streams)
    script.words.extend(each.data_ptr() for each in (script.hidden, *script.streams))  # nor may these differ
    return script


class _Script:
    """The calls of a step, written down instead of made, and its results, placed where they stay."""

    hidden: Tensor  # [tokens, H], or [rows, H]
    streams: list[Tensor]  # [tokens, H] each

    def __init__(self, tokens: int, rows: int, memory: Memory) -> None:
        self.tokens, self.rows = tokens, rows
        self.entries: list[int] = []
        """The kernels that are called."""
        self.words = array("q")
        """The calls, as `csrc/replay.c` reads them."""
        self.row_bytes: list[int] = []
        """The bytes of a token in each result, in the order of results."""
        self._memory = memory

    def call(self, name: str, entry: int | None, types: Sequence[Any], arguments: Sequence[Any]) -> None:
        if entry is None:
            raise Unrecordable(f"C cannot replay {name}")
        self.entries.append(entry)
        self.words.extend((entry, len(arguments), *map(as_word, types, arguments)))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for a result of this step, with room behind it for the most tokens."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if not nbytes or shape[0] not in (self.tokens, self.rows):
            raise Unrecordable(f"a result {list(shape)} is not a row for each token")
        self.row_bytes.append(nbytes // shape[0])
        piece = self._memory.take(self.row_bytes[-1] * MOST_TOKENS)
        if piece is None:
            raise Unrecordable(f"there is no room for results of {self.row_bytes[-1]} bytes for each token")
        return piece[:nbytes].view(dtype).view(shape)


def as_word(kind: Any, value: Any) -> int:
    """An argument as the number that `word` of `csrc/call_arguments.h` has in its place."""
    if kind is FLOAT:
        return int.from_bytes(struct.pack("<f", value), "little")
    return 0 if value is None else int(value)


_aten = torch.ops.aten
_HOST_OPS = {_aten.lift_fresh.default, _aten.resolve_conj.default, _aten.resolve_neg.default}
"""Operations that bring numbers from the host, or come before it reads some by `tolist` or `numpy`."""


class _OpWatcher(TorchDispatchMode):
    """Lets torch make views of tensors, and refuses all else: what torch computes would not be replayed."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare torch the import of its compiler, which it would keep from here: that takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not func.is_view or func in _HOST_OPS:
            raise Unrecordable(f"it needs {func}")
        out = func(*args, **(kwargs or {}))
        memory = args[0].untyped_storage().data_ptr()
        for view in [out] if isinstance(out, Tensor) else out:
            if view.untyped_storage().data_ptr() != memory:  # a copy, as a reshape may make
                raise Unrecordable(f"it needs {func}")
        return out
