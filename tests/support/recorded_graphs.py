"""A stand-in for CUDA graphs on a CPU: it writes calls down and makes them again, at the same addresses.

As a graph does, it computes nothing new from Python: what is replayed are torch's operations and kernels with
the tensors that they got. Each replay spoils all memory of its pool, so nothing may live on there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from recorded_nccl import EXCHANGES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from worker.kernels.cuda.launch import KernelLaunch, taking

Result = TypeVar("Result")

_aten = torch.ops.aten
_WAITS = (_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.lift_fresh.default)
"""Operations that wait for the device, or bring numbers from the host: a card refuses to capture them."""
_UNWRITTEN = (_aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default)


@dataclass(frozen=True)
class _Op:
    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any

    def again(self) -> None:
        if self.func in _UNWRITTEN:
            return
        made = self.func(*self.args, **self.kwargs)
        for old, new in zip(_tensors(self.out), _tensors(made), strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)


class _Writer(TorchDispatchMode):
    """Runs work and writes it down."""

    def __init__(self, *, captures: bool) -> None:
        """`captures`: exchanges with other ranks are only written down, as on a card everything is."""
        super().__init__()
        self._captures = captures
        self.calls: list[_Op | KernelLaunch] = []
        self.made: dict[int, torch.UntypedStorage] = {}
        """The memory that the work has made, by address."""
        self.found: set[int] = set()
        """The addresses of memory that was there before."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        assert func not in _WAITS, f"{func} cannot be captured"
        kwargs = kwargs or {}
        self._find(_tensors((args, kwargs)))
        noted_only = self._captures and func.namespace == EXCHANGES
        out = None if noted_only else func(*args, **kwargs)
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.found:
                self.made[storage.data_ptr()] = storage
        self.calls.append(_Op(func, args, kwargs, out))
        return out

    def take(self, call: KernelLaunch) -> None:
        self._find(_tensors(call.arguments))
        self.calls.append(call)
        with _disable_current_modes():
            call.start()

    def _find(self, tensors: list[Tensor]) -> None:
        self.found |= {tensor.untyped_storage().data_ptr() for tensor in tensors} - self.made.keys()


class RecordedGraphs:
    """A `Capture`, which knows what was captured, and which of it was replayed, in order."""

    def __init__(self) -> None:
        self.captured: list[list[_Op | KernelLaunch]] = []
        self.replayed: list[int] = []
        self._launched: WeakKeyDictionary[Callable[[], None], int] = WeakKeyDictionary()
        self._pool: list[torch.UntypedStorage] = []
        """The memory of all graphs of this capture."""

    def with_own_pool(self) -> RecordedGraphs:
        """Another capture, whose graphs are counted here but have memory of their own."""
        other = copy(self)
        other._pool = []
        return other

    def warm_up(self, work: Callable[[], object]) -> None:
        self._first = _Writer(captures=False)
        _run(self._first, work)

    def __call__(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        writer = _Writer(captures=True)
        result = _run(writer, work)
        assert writer.found == self._first.found, "what work finds must lie at fixed addresses"
        number = len(self.captured)
        self.captured.append(writer.calls)
        self._pool += writer.made.values()

        def replay() -> None:
            self.replayed.append(number)
            for storage in self._pool:
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)
            for call in writer.calls:
                call.start() if isinstance(call, KernelLaunch) else call.again()

        self._launched[replay] = len(launches(writer.calls))
        return result, replay

    def seconds(self, replay: Callable[[], None]) -> float:
        """As many as there are launches, which is what a small step takes its time for."""
        return self._launched[replay]


def _run(writer: _Writer, work: Callable[[], Result]) -> Result:
    with writer, taking(writer.take):
        return work()


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def launches(calls: list[_Op | KernelLaunch]) -> list[str]:
    """The names of what a card would launch for these calls: not views, nor memory that is only taken."""
    names: list[str] = []
    for call in calls:
        if isinstance(call, KernelLaunch):
            names.append(call.kernel.fn.__name__)
        elif call.func not in _UNWRITTEN and not _is_view(call):
            names.append(str(call.func))
    return names


def _is_view(op: _Op) -> bool:
    known = {tensor.untyped_storage().data_ptr() for tensor in _tensors((op.args, op.kwargs))}
    made = {tensor.untyped_storage().data_ptr() for tensor in _tensors(op.out)}
    return made <= known and not op.func._schema.is_mutable
