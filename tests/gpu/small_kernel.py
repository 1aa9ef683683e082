"""A kernel that does next to nothing, by which the gap between two kernels is measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.kernels.cuda.launch import Call


@triton.jit
def add_one(numbers, dependent: tl.constexpr):
    """Add one to each of 1024 numbers. `dependent`: it may start while the kernel before it still runs."""
    if dependent:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.arange(0, 1024)
    tl.store(numbers + at, tl.load(numbers + at) + 1)


@dataclass(frozen=True)
class SmallKernel:
    dependent: bool

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": 4, **({"launch_pdl": True} if self.dependent else {})}


KERNELS = {
    "from kernel to kernel in a graph": SmallKernel(dependent=False),
    "the same, launched before the last one ends": SmallKernel(dependent=True),
}


def count_up(numbers: Tensor, kernel: SmallKernel) -> None:
    add_one[(1,)](numbers, kernel.dependent, **kernel.options)


def small_calls() -> list[Call]:
    """A call for each variant, to compile it ahead."""
    numbers = torch.empty(1024, dtype=torch.int32, device="meta")
    return [Call(add_one, (1,), (numbers, each.dependent), each.options) for each in KERNELS.values()]
