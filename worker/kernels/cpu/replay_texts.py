"""Small steps of an encoder's texts without Python: one recording for all of them.

No two steps have as many tokens and texts. But where all tensors stay where they are, with room for the most
tokens, these two counts are all that differs in the calls of kernels. Which words they are shows when a step
is written down twice, with other counts. Nothing is computed meanwhile, so a model that leaves anything to
torch, or whose calls differ in more, cannot be recorded, and runs as if this module were not there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.context import context, use_context
from models.model import Forward
from worker.host.memory import huge_pages
from worker.kernels.cpu.library import LONG, POINTER, Library
from worker.kernels.cpu.positions import MOST_TOKENS, Layout
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


def replay_texts(forward: Forward, library: Library, layout: Layout, longest: int) -> Forward:
    """A model's forward pass, with the same results; to be called under `use_context`, as the model's.

    `layout`: says where the inputs of small steps are. `longest`: how many tokens a text may have.
    """
    whole, rest = divmod(MOST_TOKENS, longest)
    most = [longest] * whole + [rest] * (rest > 0)
    few = [2] + [1] * len(most)  # other numbers, that of tokens not being that of texts
    memory = huge_pages(RESULT_BYTES)
    try:
        recording = _put_together(*(_record(forward, library, layout, memory, each) for each in (few, most)))
    except Unrecordable as reason:
        logger.debug("texts are not replayed: %s", reason)
        return forward
    return _Replayed(forward, library.function("replay", POINTER, LONG), layout.texts([1])[0], recording)


class _Replayed:
    def __init__(
        self, forward: Forward, replay: Callable[[int, int], None], ids: Tensor, recording: _Recording
    ) -> None:
        """`ids`: lie where those of small steps do."""
        self._forward = forward
        self._replay = replay
        self._place = ids.data_ptr()
        self._recording = recording

    def __call__(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        step = context()
        if stream is not None or step.token_types is not None or ids.data_ptr() != self._place:
            return self._forward(ids, positions, stream)
        recording = self._recording
        recording.words[recording.tokens] = len(ids)
        recording.words[recording.texts] = len(step.query_lens_host)
        self._replay(recording.words.ctypes.data, recording.count)
        return recording.hidden[: len(ids)].clone()  # where it lies, the next step writes


@dataclass(frozen=True, slots=True)
class _Recording:
    """A forward pass for any number of tokens and texts."""

    words: np.ndarray  # int64, as `csrc/replay.c` reads them
    count: int
    """Of calls."""
    tokens: np.ndarray  # places of the words that are the number of tokens
    texts: np.ndarray
    hidden: Tensor  # [MOST_TOKENS, H]
    """Where the result will be."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that was written down."""

    tokens: int
    texts: int
    words: np.ndarray
    count: int
    rows: list[int]
    """Bytes of a token in each result, in the order in which they are made."""
    hidden: Tensor


@torch.inference_mode()
def _record(
    forward: Forward, library: Library, layout: Layout, memory: Tensor, lengths: Sequence[int]
) -> _Step:
    ids, step = layout.texts(lengths)
    tape = _Tape(memory, len(ids))
    with use_context(RecordedStep.of(step)), library.told_to(tape.call), tape:
        hidden = forward(ids, step.positions, None)
    words = np.array(tape.calls.words, np.int64)
    return _Step(len(ids), len(lengths), words, tape.calls.count, tape.rows, hidden)


def _put_together(few: _Step, most: _Step) -> _Recording:
    if few.rows != most.rows or len(few.words) != len(most.words):
        raise Unrecordable("other texts are computed otherwise")
    tokens = (few.words == few.tokens) & (most.words == most.tokens)
    texts = (few.words == few.texts) & (most.words == most.texts)
    if not np.array_equal(few.words != most.words, tokens | texts):
        raise Unrecordable("calls differ in more than the numbers of tokens and texts")
    return _Recording(most.words, most.count, np.flatnonzero(tokens), np.flatnonzero(texts), most.hidden)


class _Tape(Watched):
    """Writes down the calls of a forward pass, which are not made, and puts all results into our memory."""

    def __init__(self, memory: Tensor, tokens: int) -> None:
        super().__init__()
        self.calls = Calls()
        self.rows: list[int] = []
        self._memory = Memory(memory)
        self._tokens = tokens

    def call(self, name: str, entry: int | None, types: Sequence[Any], arguments: Sequence[Any]) -> bool:
        if entry is None:
            raise Unrecordable(f"C cannot repeat {name}")
        self.calls.add(entry, types, arguments)
        return True

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in MAKES_MEMORY:
            return self._place(out)
        if not makes_view(func, args, out):
            raise Unrecordable(f"the model needs {func}")
        return out

    def _place(self, like: Tensor) -> Tensor:
        """Where it stays, with room for the most tokens."""
        if not (like.is_contiguous() and like.nbytes and len(like) == self._tokens):
            raise Unrecordable(f"a result {list(like.shape)} is not one of tokens")
        self.rows.append(like.nbytes // self._tokens)
        piece = self._memory.take(self.rows[-1] * MOST_TOKENS)
        if piece is None:
            raise Unrecordable(f"no room for results of {self.rows[-1]} bytes for each token")
        return piece[: like.nbytes].view(like.dtype).view(like.shape)
