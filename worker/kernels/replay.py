"""Small decode steps without Python: the calls of one are written down, and made again by one call of C.

Steps that bring one new token to each of as many sequences call the same kernels with the same arguments, as
long as all tensors stay where they are: what differs lies in them. So the first step of a size runs with
inputs and results in memory of ours, and later ones only bring their inputs there. The few operations that
are left to torch are made again one by one; a model that needs others runs as if this module were not there.
"""

from __future__ import annotations

import logging
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.context import ForwardContext, context, use_context
from worker.kernels.library import FLOAT, LONG, POINTER, Library
from worker.kernels.memory import huge_pages

logger = logging.getLogger(__name__)

MOST_ROWS = 16
"""Beyond, what Python costs is little beside the computing."""

_RESULT_BYTES = 64 << 20
"""For the results of a step. Committed as they are used: 16 rows of a model with 0.6B weights take 13 MB."""

Forward = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Of a model: ids, positions, the stream of an earlier stage -> hidden states."""

_aten = torch.ops.aten
_MAKES_MEMORY = {_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default}
# Their results depend on nothing but what is in their tensors, in numbers and not in shape.
_REPEATABLE = {
    _aten.embedding.default,
    _aten.to.dtype,
    _aten.contiguous.default,
    _aten.cat.default,
    _aten.add.Tensor,
    _aten.mul.Tensor,
    _aten.cos.default,
    _aten.sin.default,
}

_CONSTANT = _aten.lift_fresh.default
"""Of the host's making: another step may make another."""


class Replayed:
    """A model's forward pass, with the same results; to be called under `use_context`, as the model's."""

    def __init__(self, forward: Forward, library: Library, blocks: int) -> None:
        """`blocks`: of the cache that a sequence may have."""
        self._forward = forward
        self._library = library
        self._replay = library.function("replay", POINTER, LONG)
        self._inputs = _Inputs(blocks)
        self._results = huge_pages(_RESULT_BYTES)  # all recordings share them: one runs at a time
        self._recordings: dict[int, _Recording] = {}  # by rows
        self._most_rows = MOST_ROWS

    def __call__(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        step, rows = context(), len(ids)
        if stream is not None or rows > self._most_rows or rows > len(step.kv_lens):
            return self._forward(ids, positions, stream)
        self._inputs.bring(ids, step)
        recording = self._recordings.get(rows)
        hidden = self._record(step) if recording is None else recording.run(self._replay)
        return hidden.clone()  # where it lies, the next step writes

    def _record(self, step: ForwardContext) -> Tensor:
        ids, inputs = self._inputs.of(step)
        tape = _Tape(self._results)
        with use_context(inputs), self._library.told_to(tape.call), tape:
            hidden = self._forward(ids, inputs.positions, None)
        if tape.spoilt:
            self._most_rows = len(ids) - 1
            logger.debug("steps of %d rows and more are not replayed: %s", len(ids), tape.spoilt)
        else:
            self._recordings[len(ids)] = _Recording(tape.pieces, hidden)
        return hidden


class _Inputs:
    """Where all recordings look for them."""

    def __init__(self, blocks: int) -> None:
        self._ids = torch.zeros(MOST_ROWS, dtype=torch.int64)
        self._positions = torch.zeros(MOST_ROWS, dtype=torch.int64)
        self._slot_mapping = torch.zeros(MOST_ROWS, dtype=torch.int64)
        self._query_starts = torch.arange(MOST_ROWS + 1, dtype=torch.int32)
        self._kv_lens = torch.zeros(MOST_ROWS, dtype=torch.int32)
        self._block_table = torch.zeros(MOST_ROWS, blocks, dtype=torch.int32)

    def bring(self, ids: Tensor, step: ForwardContext) -> None:
        rows, width = step.block_table.shape
        self._ids[:rows] = ids
        self._positions[:rows] = step.positions
        self._slot_mapping[:rows] = step.slot_mapping
        self._kv_lens[:rows] = step.kv_lens
        self._block_table[:rows, :width] = step.block_table  # beyond the longest sequence nothing is read

    def of(self, step: ForwardContext) -> tuple[Tensor, ForwardContext]:
        """-> ids and context, as the model is to see them."""
        rows = len(step.positions)
        inputs = replace(
            step,
            positions=self._positions[:rows],
            query_starts=self._query_starts[: rows + 1],
            kv_lens=self._kv_lens[:rows],
            block_table=self._block_table[:rows],
            slot_mapping=self._slot_mapping[:rows],
        )
        return self._ids[:rows], inputs


@dataclass(frozen=True, slots=True)
class _Recording:
    """A forward pass for a certain number of rows."""

    pieces: list[_Calls | _Operation]
    hidden: Tensor
    """Where the result will be."""

    def run(self, replay: Callable[[int, int], None]) -> Tensor:
        for piece in self.pieces:
            if isinstance(piece, _Calls):
                replay(piece.words.buffer_info()[0], piece.count)
            else:
                piece.out.copy_(piece.function(*piece.arguments, **piece.options))
        return self.hidden


class _Calls:
    """Of kernels, one after the other, as `csrc/replay.c` reads them."""

    def __init__(self) -> None:
        self.words = array("q")
        self.count = 0

    def add(self, entry: int, types: Sequence[Any], arguments: Sequence[Any]) -> None:
        self.words.extend((entry, len(arguments), *map(_word, types, arguments)))
        self.count += 1


@dataclass(frozen=True, slots=True)
class _Operation:
    """Of torch. It keeps its tensors, so that they stay where the calls after it look for them."""

    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    out: Tensor


class _Tape(TorchDispatchMode):
    """Writes down the calls of a forward pass, of kernels and of torch."""

    def __init__(self, memory: Tensor) -> None:
        """`memory`: for what kernels write."""
        super().__init__()
        self.pieces: list[_Calls | _Operation] = []
        self.spoilt = ""
        """Why what was written down is of no use."""
        self._memory = memory

    def call(self, name: str, entry: int | None, types: Sequence[Any], arguments: Sequence[Any]) -> None:
        if entry is None:
            self.spoilt = f"C cannot repeat {name}"
            return
        calls = self.pieces[-1] if self.pieces else None
        if not isinstance(calls, _Calls):
            calls = _Calls()
            self.pieces.append(calls)
        calls.add(entry, types, arguments)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        out = func(*args, **options)
        if func in _MAKES_MEMORY:
            return self._place(out)
        if func.is_view and func is not _CONSTANT and _is_in_place(out, args):
            return out
        if func in _REPEATABLE:
            self.pieces.append(_Operation(func, args, options, out))
        else:
            self.spoilt = f"the model needs {func}"
        return out

    def _place(self, like: Tensor) -> Tensor:
        """In our memory, where it stays."""
        taken = -(-like.nbytes // 64) * 64
        if taken > len(self._memory) or not like.is_contiguous():
            self.spoilt = f"no room for a result {list(like.shape)}"
            return like
        piece, self._memory = self._memory[: like.nbytes], self._memory[taken:]
        return piece.view(like.dtype).view(like.shape)


def _is_in_place(out: Tensor | Sequence[Tensor], arguments: Sequence[Tensor]) -> bool:
    """Whether what may be a view of the first argument is one, and not a copy."""
    memory = arguments[0].untyped_storage().data_ptr()
    views = [out] if isinstance(out, Tensor) else out
    return all(view.untyped_storage().data_ptr() == memory for view in views)


def _word(kind: Any, value: Any) -> int:
    """`word` in `csrc/words.h`."""
    if kind is FLOAT:
        return int.from_bytes(struct.pack("<f", value), "little")
    return 0 if value is None else int(value)
