"""A stand-in for torch's NCCL on a CPU, whose exchanges can be recorded: they are operations of torch.

Bytes travel through a group of the host. As with NCCL, results are written where they are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.parallel.parallel import Exchange
from worker.ranks.process_groups import HostGroup, Membership

EXCHANGES = "ranks"
"""The namespace of operations that exchange tensors with other ranks, in place."""
_numbers = count()
_groups: dict[int, HostGroup] = {}
_library = torch.library.Library(EXCHANGES, "DEF")


def _all_reduce(x: Tensor, group: int) -> None:
    x.copy_(_groups[group].all_reduce(x))


def _all_gather(everyone: Tensor, x: Tensor, group: int) -> None:
    pieces = _groups[group].all_gather(x).chunk(len(everyone), dim=-1)
    everyone.copy_(torch.stack(pieces))


_library.define("all_reduce(Tensor(a!) x, int group) -> ()")
_library.define("all_gather(Tensor(a!) everyone, Tensor x, int group) -> ()")
_library.impl("all_reduce", _all_reduce, "CompositeExplicitAutograd")
_library.impl("all_gather", _all_gather, "CompositeExplicitAutograd")


@dataclass(frozen=True)
class _Done:
    def wait(self) -> None:
        """It is there."""


@dataclass(frozen=True)
class _Sent:
    """A tensor that NCCL may read until somebody has waited for it."""

    transfer: Exchange
    x: Tensor
    before: Tensor

    def wait(self) -> None:
        self.transfer.wait()
        assert torch.equal(self.x, self.before), "it was written to before it was sent"


class RecordedNccl:
    """A `dist.ProcessGroupNCCL`."""

    Options = SimpleNamespace

    def __init__(self, store: Any, rank: int, size: int, options: SimpleNamespace) -> None:
        self._number = next(_numbers)
        _groups[self._number] = HostGroup(Membership("nccl", store, rank, size, "127.0.0.1"))

    def allreduce(self, tensors: list[Tensor]) -> _Done:
        getattr(torch.ops, EXCHANGES).all_reduce(*tensors, self._number)
        return _Done()

    def _allgather_base(self, everyone: Tensor, x: Tensor) -> _Done:
        getattr(torch.ops, EXCHANGES).all_gather(everyone, x, self._number)
        return _Done()

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Exchange:
        (x,) = tensors
        return _Sent(_groups[self._number].send(x, to), x, x.clone())

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Done:
        _groups[self._number].receive(*tensors, source)
        return _Done()

    def abort(self) -> None:
        _groups.pop(self._number).close()


def install() -> None:
    """Put it in the place of NCCL, which torch for CPUs does not have."""
    setattr(dist, "ProcessGroupNCCL", RecordedNccl)  # noqa: B010
