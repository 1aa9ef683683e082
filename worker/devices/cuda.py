"""A CUDA device: its memory, its transfers and the sizes it has by default."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from models.model import Forward
from models.ops import reference
from worker.devices.base import GIB, CacheBudget, Defaults, Fetch
from worker.host.memory import PageToucher
from worker.ranks.groups import DeviceGroup, Group, Membership
from worker.sampling import bounds
from worker.sampling.groups import BY_TORCH
from worker.tables.positions import LayOut, lay_out
from worker.tables.slots import Slots

_SHARE = 0.92


def _pack(*parts: Tensor, gated: bool = False, wide: bool = False, sections: int | None = None) -> Tensor:
    """Pack without sections, which would bring nothing: NCCL adds ranks up in an order of its own."""
    return reference.pack(*parts)


class Cuda:
    kernels: Mapping[str, Callable[..., Any]] = {"pack": _pack}
    may_sync = False
    scan = BY_TORCH
    forbid = staticmethod(bounds.forbid)

    def __init__(self, index: int = 0) -> None:
        there = torch.cuda.device_count()
        if index >= there:
            raise ValueError(
                f"worker {index + 1} on this machine needs a CUDA device of its own, and there are {there}: "
                "lower --tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size-local"
            )
        self.target = torch.device("cuda", index)
        torch.cuda.set_device(self.target)
        self.name = self.arithmetic = f"cuda ({torch.cuda.get_device_name(self.target)})"
        _, total = torch.cuda.mem_get_info(self.target)
        large = total >= 70 * GIB
        self.defaults = Defaults(64, 1024 if large else 256, 8192 if large else 2048)
        self.pooling_defaults = Defaults(64, 1024, 16384)

    def check_dtype(self, dtype: torch.dtype) -> None:
        major, minor = torch.cuda.get_device_capability(self.target)
        if dtype == torch.bfloat16 and major < 8:
            raise ValueError(
                f"{self.name} has compute capability {major}.{minor} and bfloat16 needs 8.0: "
                "pass --dtype float16 or --dtype float32"
            )

    def sums_ranks_exactly(self, dtype: torch.dtype) -> bool:
        """Return false: NCCL adds in an order of its own."""
        return False

    def after_loading(self, weights: Iterable[Tensor]) -> None:
        """Do nothing: no setting of this device depends on the weights."""

    def captured(self, forward: Forward, slots: Slots, *, replays: bool) -> tuple[LayOut, Forward]:
        """The plain functions: nothing is recorded on this device yet."""
        return lay_out, forward

    def cache_budget(self, share: float | None, reserve: int) -> CacheBudget:
        """The wanted share of all memory, less the bytes in use and those that a step needs."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.target)
        wanted = int(total * (_SHARE if share is None else share))
        return CacheBudget(max(0, wanted - (total - free) - reserve), "--gpu-memory-utilization", most=free)

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.target)

    def page_toucher(self, parts: Sequence[Tensor], blocks: int) -> PageToucher | None:
        """Return no thread: memory of the device has no pages that are made later."""
        return None

    def staging_buffer(self, words: int) -> tuple[Tensor, Tensor]:
        """The host's part is pinned memory, or the copy to the device would make the host wait."""
        host = torch.empty(words, dtype=torch.int32, pin_memory=True)
        return host, torch.empty(words, dtype=torch.int32, device=self.target)

    def fetch(self, values: Tensor) -> Fetch:
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        done = torch.cuda.Event(blocking=True)  # the waiting thread sleeps, it does not spin
        done.record()
        return Fetch(host, done)

    def open_group(self, member: Membership) -> Group:
        return DeviceGroup(member)

    def close(self) -> None:
        torch.cuda.empty_cache()
