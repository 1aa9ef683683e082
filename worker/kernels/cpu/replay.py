"""Small decode steps without Python: the calls of one are written down, and made again by one call of C.

Steps that bring one new token to each of as many sequences call the same kernels with the same arguments, as
long as all tensors stay where they are: what differs lies in them. So the first step of a size runs with
inputs and results in memory of ours, and later ones only bring their inputs there. The few operations that
are left to torch are made again one by one; a model that needs others runs as if this module were not there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.context import context, use_context
from models.model import Forward
from worker.host.memory import huge_pages
from worker.kernels.cpu.library import LONG, POINTER, Library
from worker.kernels.cpu.positions import Layout
from worker.kernels.cpu.tape import (
    MAKES_MEMORY,
    RESULT_BYTES,
    Calls,
    Memory,
    RecordedStep,
    Unrecordable,
    Watched,
    makes_view,
)

logger = logging.getLogger(__name__)

MOST_ROWS = 64
"""Beyond, what Python costs is little beside the computing."""

_aten = torch.ops.aten
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


class Replayed:
    """A model's forward pass, with the same results; to be called under `use_context`, as the model's."""

    def __init__(self, forward: Forward, library: Library, layout: Layout) -> None:
        """`layout`: says where the inputs of small steps are."""
        self._forward = forward
        self._library = library
        self._replay = library.function("replay", POINTER, LONG)
        self._layout = layout
        self._results = huge_pages(RESULT_BYTES)  # all recordings share them: one runs at a time
        self._recordings: dict[int, _Recording] = {}  # by rows
        self._most_rows = MOST_ROWS

    def __call__(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        rows = len(ids)
        if stream is not None or rows > self._most_rows or ids is not self._layout.kept(rows).ids:
            return self._forward(ids, positions, stream)
        recording = self._recordings.get(rows)
        hidden = self._record(ids, positions) if recording is None else recording.run(self._replay)
        return hidden.clone()  # where it lies, the next step writes

    def _record(self, ids: Tensor, positions: Tensor) -> Tensor:
        tape = _Tape(self._results)
        try:
            with use_context(RecordedStep.of(context())), self._library.told_to(tape.call), tape:
                hidden = self._forward(ids, positions, None)
        except Unrecordable as reason:
            tape.spoilt = str(reason)
            hidden = self._forward(ids, positions, None)  # from the beginning: it was left in the middle
        if tape.spoilt:
            self._most_rows = len(ids) - 1
            logger.debug("steps of %d rows and more are not replayed: %s", len(ids), tape.spoilt)
        else:
            self._recordings[len(ids)] = _Recording(tape.pieces, hidden)
        return hidden


@dataclass(frozen=True, slots=True)
class _Recording:
    """A forward pass for a certain number of rows."""

    pieces: list[Calls | _Operation]
    hidden: Tensor
    """Where the result will be."""

    def run(self, replay: Callable[[int, int], None]) -> Tensor:
        for piece in self.pieces:
            if isinstance(piece, Calls):
                replay(piece.words.buffer_info()[0], piece.count)
            else:
                piece.out.copy_(piece.function(*piece.arguments, **piece.options))
        return self.hidden


@dataclass(frozen=True, slots=True)
class _Operation:
    """Of torch. It keeps its tensors, so that they stay where the calls after it look for them."""

    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    out: Tensor


class _Tape(Watched):
    """Writes down the calls of a forward pass, of kernels and of torch."""

    def __init__(self, memory: Tensor) -> None:
        """`memory`: for what kernels write."""
        super().__init__()
        self.pieces: list[Calls | _Operation] = []
        self.spoilt = ""
        """Why what was written down is of no use."""
        self._memory = Memory(memory)

    def call(self, name: str, entry: int | None, types: Sequence[Any], arguments: Sequence[Any]) -> bool:
        if entry is None:
            self.spoilt = f"C cannot repeat {name}"
            return False
        calls = self.pieces[-1] if self.pieces else None
        if not isinstance(calls, Calls):
            calls = Calls()
            self.pieces.append(calls)
        calls.add(entry, types, arguments)
        return False

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        out = func(*args, **options)
        if func in MAKES_MEMORY:
            return self._place(out)
        if makes_view(func, args, out):
            return out
        if func in _REPEATABLE:
            self.pieces.append(_Operation(func, args, options, out))
        else:
            self.spoilt = f"the model needs {func}"
        return out

    def _place(self, like: Tensor) -> Tensor:
        """In our memory, where it stays."""
        piece = self._memory.take(like.nbytes) if like.is_contiguous() and like.nbytes else None
        if piece is None:
            self.spoilt = f"no room for a result {list(like.shape)}"
            return like
        return piece.view(like.dtype).view(like.shape)
