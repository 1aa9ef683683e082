"""The interface of a device to the rest of the worker: memory, number types, transfers, sizes by default.

Everything above holds a `Device` and never looks which one it is; `selection.py` opens it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from models.model import Forward
from worker.host.memory import PageToucher
from worker.ranks.groups import Group, Membership
from worker.sampling.bounds import Forbid
from worker.sampling.groups import Scan
from worker.tables.positions import LayOut
from worker.tables.slots import Slots

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Defaults:
    """The sizes of blocks and steps if the operator gives none."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class CacheBudget:
    nbytes: int
    flag: str
    """The option that an operator changes to get another budget."""
    most: int
    """The bytes that the device has beside the weights, whatever is asked for."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Values on their way to the host."""

    host: Tensor
    done: torch.cuda.Event | None

    def wait(self) -> np.ndarray:
        if self.done is not None:
            self.done.synchronize()
        return self.host.numpy()


class Device(Protocol):
    target: torch.device
    name: str
    """The name that people read in logs and that `WorkerFacts.device` carries."""
    arithmetic: str
    """Everything about the device and its kernels that decides the bits of results."""
    kernels: Mapping[str, Callable[..., Any]]
    """Operations that this device computes by its own code; the reference in `models.ops` does the others."""
    scan: Scan
    forbid: Forbid
    may_sync: bool
    """Whether a step may read a result in its middle: on a GPU the host would wait for all that is queued."""
    defaults: Defaults
    pooling_defaults: Defaults
    """Sizes for models that only pool."""

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise ValueError for a number type that the device cannot compute with, and warn of a slow one."""
        ...

    def sums_ranks_exactly(self, dtype: torch.dtype) -> bool:
        """Whether 1, 2, 4 and 8 ranks of these devices give the same bits."""
        ...

    def after_loading(self, weights: Iterable[Tensor]) -> None:
        """Adapt to the loaded weights. Called once, after loading."""
        ...

    def captured(self, forward: Forward, slots: Slots, *, replays: bool) -> tuple[LayOut, Forward]:
        """The function that lays steps out, and `forward` with small steps recorded and replayed.

        `replays`: whether all that is computed may be recorded; ranks that exchange tensors may not.
        """
        ...

    def cache_budget(self, share: float | None, reserve: int) -> CacheBudget:
        """The memory for the KV cache, called after loading; a step needs `reserve` bytes beside it.

        `share`: the part of the device's memory that may be used, if the operator has chosen one.
        """
        ...

    def allocate(self, nbytes: int) -> Tensor:
        """Memory for a cache [nbytes] uint8. Nothing is written to it."""
        ...

    def page_toucher(self, parts: Sequence[Tensor], blocks: int) -> PageToucher | None:
        """The thread that makes the pages of a cache before they are needed; None where it has them."""
        ...

    def staging_buffer(self, words: int) -> tuple[Tensor, Tensor]:
        """An int32 buffer [words] that the host writes, and its copy on the device.

        Both are one tensor where the device computes in the host's memory.
        """
        ...

    def fetch(self, values: Tensor) -> Fetch:
        """Start to copy values to the host."""
        ...

    def open_group(self, member: Membership) -> Group:
        """Join a group of ranks that exchange tensors of this device."""
        ...

    def close(self) -> None:
        """Give memory back to the system."""
        ...
