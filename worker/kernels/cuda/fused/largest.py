"""The likeliest token of each row of logits by one kernel, in steps of few rows."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from worker.kernels.cuda.capabilities import COUNTERS
from worker.kernels.cuda.fused.arrivals import is_last
from worker.kernels.cuda.launch import joined, joining, launch
from worker.sampling.grouped_logits import BY_TORCH, GROUP, Scan

_PIECE = 64
"""The groups of logits that a program reads."""


@triton.jit
def _numbers(places, there):
    """Logits, of which those that are no numbers win as infinity does."""
    x = tl.load(places, mask=there, other=float("-inf"), cache_modifier=".cg")
    return tl.where(x == x, x, float("inf"))


@triton.jit
def _choose(logits, largest, best_ptr, groups, GROUPS: constexpr, GROUP: constexpr):
    """Write the first of a row's likeliest tokens, and whether its logit is finite."""
    number, at = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    most = tl.load(largest + number, mask=number < groups, other=float("-inf"), cache_modifier=".cg")
    peak = tl.max(most, 0)
    group = tl.min(tl.where(most == peak, number, GROUPS - 1), 0)
    x = _numbers(logits + group * GROUP + at, at < GROUP)
    tl.store(best_ptr, group * GROUP + tl.min(tl.where(x == peak, at, GROUP - 1), 0))
    tl.store(best_ptr + tl.num_programs(0), (tl.abs(peak) < float("inf")).to(tl.int32))


@triton.jit(do_not_specialize=["groups"])
def find_tops(
    logits_ptr, best_ptr, largest_ptr, counters_ptr, stride, groups, GROUPS: constexpr, PIECE: constexpr,
    GROUP: constexpr,
):  # fmt: skip
    """Write the largest logit of each group of a piece; the last program of a row chooses its token."""
    row, group = tl.program_id(0), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    logits, largest = logits_ptr + row.to(tl.int64) * stride, largest_ptr + row * groups
    there = group < groups
    x = _numbers(logits + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], there[:, None])
    tl.store(largest + group, tl.max(x, 1), mask=there)
    if is_last(counters_ptr + row, tl.num_programs(1)):
        _choose(logits, largest, best_ptr + row, groups, GROUPS, GROUP)


def joined_scan(scan: Scan) -> Scan:
    """The functions that read logits, of which the first is one kernel where kernels are joined."""
    return scan if joined() is None else replace(scan, find_largest=find_largest)


def find_largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    counters, rows, groups = joined(), len(logits), logits.shape[1] // GROUP
    if counters is None or rows > COUNTERS:
        return BY_TORCH.find_largest(logits)
    best = torch.empty(2, rows, dtype=torch.int32, device=logits.device)
    largest = torch.empty(rows, groups, dtype=torch.float32, device=logits.device)
    launch(
        find_tops,
        (rows, -(-groups // _PIECE)),
        *(logits, best, largest, counters, logits.stride(0), groups),
        *(triton.next_power_of_2(groups), _PIECE, GROUP),
        num_warps=8,
    )
    return best, largest


def finds_largest(target: torch.device) -> bool:
    """Whether a card finds the tokens that torch does, of a row that is not finite, too."""
    logits = torch.randn(3, 5 * GROUP, generator=torch.Generator().manual_seed(0))
    logits[1, 70] = logits[1, 200] = 9.0
    logits[2, 40] = torch.nan
    with joining(torch.zeros(COUNTERS, dtype=torch.int32, device=target)):
        best, largest = find_largest(logits.to(target))
    expected, most = BY_TORCH.find_largest(logits)
    same = torch.equal(best[:, :2].cpu(), expected[:, :2]) and torch.equal(best[1].cpu(), expected[1])
    return same and torch.equal(largest[:2].cpu(), most[:2])
