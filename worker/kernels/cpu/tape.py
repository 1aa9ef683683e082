"""What a recording of a step is made of: the calls of kernels as words, and memory that stays where it is."""

from __future__ import annotations

import struct
import weakref
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.context import ForwardContext
from worker.kernels.cpu.library import FLOAT

RESULT_BYTES = 64 << 20
"""For the results of a step that are needed at the same time. Committed as they are used."""

_aten = torch.ops.aten
MAKES_MEMORY = {_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default}

_ON_HOST = {_aten.lift_fresh.default, _aten.resolve_conj.default, _aten.resolve_neg.default}
"""The first brings numbers from the host, the others come before the host reads some by `tolist` or `numpy`.

Either way another step may compute something else.
"""


class Unrecordable(Exception):
    """The model cannot be recorded; the message says why."""


class RecordedStep(ForwardContext):
    """A step whose numbers of tokens are unknown to the host, as those of later steps are.

    A model that reads them may compute something else next time, of which a recording would know nothing.
    """

    def __getattribute__(self, name: str) -> Any:
        if name in ("query_lens_host", "kv_lens_host"):
            raise Unrecordable(f"the model reads {name}")
        return super().__getattribute__(name)

    @classmethod
    def of(cls, step: ForwardContext) -> RecordedStep:
        return cls(**{field.name: getattr(step, field.name) for field in fields(step)})


class Calls:
    """Of kernels, one after the other, as `csrc/replay.c` reads them."""

    def __init__(self) -> None:
        self.words = array("q")
        self.count = 0

    def add(self, entry: int, types: Sequence[Any], arguments: Sequence[Any]) -> None:
        self.words.extend((entry, len(arguments), *map(_word, types, arguments)))
        self.count += 1


class Memory:
    """Hands out pieces, and hands them out again when nothing is left of the tensors that were made of them.

    What is made again uses the same memory in the same order. So all layers share what one needs: a few
    megabytes, of which much stays in the cache.
    """

    def __init__(self, memory: Tensor) -> None:
        self._bytes = memory.numpy()
        self._used = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        """Where pieces begin that have been given back, by their size."""

    def take(self, nbytes: int) -> Tensor | None:
        size = -(-nbytes // 64) * 64
        free = self._free[size]
        if not free and self._used + size > len(self._bytes):
            return None
        start = free.pop() if free else self._used
        self._used = max(self._used, start + size)
        piece = self._bytes[start : start + nbytes]
        weakref.finalize(piece, free.append, start)  # a tensor made of it holds it, as all views of it do
        return torch.frombuffer(piece, dtype=torch.uint8)


class Watched(TorchDispatchMode):
    """All that torch is asked for meanwhile goes through `__torch_dispatch__`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would keep its compiler away from here, and to that end import it, which takes a second."""
        return False


def makes_view(function: Any, arguments: Sequence[Tensor], out: Tensor | Sequence[Tensor]) -> bool:
    """Whether what may be a view of the first argument is one, and not a copy."""
    if not function.is_view or function in _ON_HOST:
        return False
    memory = arguments[0].untyped_storage().data_ptr()
    views = [out] if isinstance(out, Tensor) else out
    return all(view.untyped_storage().data_ptr() == memory for view in views)


def _word(kind: Any, value: Any) -> int:
    """`word` in `csrc/words.h`."""
    if kind is FLOAT:
        return int.from_bytes(struct.pack("<f", value), "little")
    return 0 if value is None else int(value)
