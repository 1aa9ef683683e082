"""The choice of experts on CUDA: cuBLAS multiplies rows by the router, one kernel does all that follows."""

# Triton hands a NamedTuple to a kernel as it is.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from models.ops.expert_routing_ops import Routing
from worker.kernels.cuda.launch import launch, power_of_2, warps_for
from worker.kernels.cuda.products.quantized import multiply_plain

_LEAST: constexpr = constexpr(-(1 << 63))
"""What stands in place of what cannot be chosen, or has been: no key is as small."""


class Rule(NamedTuple):
    """The constants of a compiled variant: the rule by which experts are chosen."""

    softmax: bool  # or else a sigmoid
    normalised: bool
    groups: int
    size: int  # experts of a group
    kept: int  # groups that a token may choose from
    summed: int  # a group's best scores that decide on that
    chosen: int


@triton.jit
def _keys(scores, number):
    """Whole numbers of 64 bits in the order of scores; of equal scores the one with the lower number wins."""
    bits = scores.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - number)


@triton.jit
def _score(key):
    """The score that a key was made of."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def choose(
    logits_ptr, bias_ptr, correction_ptr, factors_ptr, ids_ptr, weights_ptr, epsilon, least_sum, factor,
    RULE: constexpr, GROUPS: constexpr, SIZE: constexpr,
):  # fmt: skip
    """Choose the experts of one token, and write them in ascending order; as a table [GROUPS, SIZE]."""
    token = tl.program_id(0).to(tl.int64)
    group, place = tl.arange(0, GROUPS), tl.arange(0, SIZE)
    expert = group[:, None] * RULE.size + place[None, :]
    there = (group < RULE.groups)[:, None] & (place < RULE.size)[None, :]
    at = logits_ptr + token * (RULE.groups * RULE.size) + expert
    logits = tl.load(at, mask=there, other=float("-inf"))
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + expert, mask=there, other=0.0).to(tl.float32)
    if RULE.softmax:
        scores = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores /= tl.sum(tl.sum(scores, 1), 0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    ranked = scores
    if correction_ptr is not None:
        ranked += tl.load(correction_ptr + expert, mask=there, other=0.0)
    keys = tl.where(there, _keys(ranked, expert), _LEAST)
    if RULE.kept < RULE.groups:
        best = tl.max(keys, 1)
        total = _score(best)
        if RULE.summed > 1:
            total += _score(tl.max(tl.where(keys == best[:, None], _LEAST, keys), 1))
        of_groups = tl.where(group < RULE.groups, _keys(total, group), _LEAST)
        left = of_groups
        for _ in range(RULE.kept):
            left = tl.where(left == tl.max(left, 0), _LEAST, left)
        keys = tl.where((left != of_groups)[:, None], keys, _LEAST)
    rest = keys
    for _ in range(RULE.chosen):
        rest = tl.where(rest == tl.max(tl.max(rest, 1), 0), _LEAST, rest)
    chosen = rest != keys
    weights = scores
    if RULE.normalised:
        total = tl.sum(tl.sum(tl.where(chosen, scores, 0.0), 1), 0) + epsilon
        weights /= tl.where(total < least_sum, least_sum, total)
    weights *= factor
    if factors_ptr is not None:
        weights *= tl.load(factors_ptr + expert, mask=there, other=0.0)
    taken = tl.reshape(chosen.to(tl.int32), [GROUPS * SIZE])
    out = token * RULE.chosen + tl.cumsum(taken, 0) - 1
    tl.store(ids_ptr + out, tl.reshape(expert, [GROUPS * SIZE]), mask=taken > 0)
    tl.store(weights_ptr + out, tl.reshape(weights, [GROUPS * SIZE]), mask=taken > 0)


@triton.jit
def add_gated_rows(x_ptr, rows_ptr, gate_ptr, total_ptr, out_ptr, width, BLOCK: constexpr):
    """Add to one row [width] another one times the sigmoid of the product of a third with the gate."""
    at = tl.arange(0, BLOCK)
    place, there = tl.program_id(0).to(tl.int64) * width + at, at < width
    x = tl.load(x_ptr + place, mask=there, other=0.0).to(tl.float32)
    product = tl.sum(x * tl.load(gate_ptr + at, mask=there, other=0.0).to(tl.float32), 0)
    row = tl.load(rows_ptr + place, mask=there, other=0.0).to(tl.float32)
    total = tl.load(total_ptr + place, mask=there, other=0.0).to(tl.float32)
    total += row / (1.0 + tl.exp(-product))
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=there)


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    routing: Routing,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    logits = _logits(x, weight)
    ids = torch.empty(len(x), routing.chosen, dtype=torch.int32, device=x.device)
    weights = torch.empty(ids.shape, dtype=torch.float32, device=x.device)
    size = routing.experts // routing.groups
    rule = Rule(
        softmax=routing.scores == "softmax",
        normalised=routing.normalised,
        groups=routing.groups,
        size=size,
        kept=routing.kept_groups,
        summed=routing.summed_best,
        chosen=routing.chosen,
    )
    launch(
        choose,
        (len(x),),
        *(logits, bias, correction, factors, ids, weights),
        *(routing.epsilon, routing.least_sum, routing.factor),
        *(rule, power_of_2(routing.groups), power_of_2(size)),
        num_warps=1,
    )
    return ids, weights


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    """The products [T, E] of rows and the router, in float32, of which 16 bits would choose others."""
    if x.is_cuda and x.dtype == weight.dtype:
        return multiply_plain(x, weight, None, wide=True)
    return F.linear(x.float(), weight.float())


def add_gated(x: Tensor, rows: Tensor, gate: Tensor, total: Tensor) -> Tensor:
    out, block = torch.empty(x.shape, dtype=x.dtype, device=x.device), power_of_2(x.shape[1])
    given = (each.contiguous() for each in (x, rows, gate, total))
    launch(
        add_gated_rows,
        (len(x),),
        *(*given, out, x.shape[1], block),
        num_warps=warps_for(block),
    )
    return out


OPERATIONS: dict[str, Callable[..., Any]] = {"route": route, "add_gated": add_gated}
"""The operations of this module by name, for `models.ops.use`."""
