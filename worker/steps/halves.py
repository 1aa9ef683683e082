"""Cuts a step of replicas that share experts into two halves, each with a context of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from models.context import ForwardContext


def cut_step(
    context: ForwardContext, first_halves: Sequence[int], replica: int
) -> tuple[ForwardContext, ForwardContext]:
    """Cut the step of a replica behind as many tokens as its first half has.

    `first_halves`: the tokens of the first half of each replica. A sequence that is cut has a row in both
    halves: the second one goes on where the first ends.
    """
    totals = context.replica_tokens
    if len(first_halves) != len(totals) or not all(
        0 < first < total for first, total in zip(first_halves, totals, strict=True)
    ):
        raise ValueError(f"steps of {totals} tokens cannot have first halves of {list(first_halves)}")
    tokens, lens, ends = first_halves[replica], context.query_lens_host, context.kv_lens_host
    starts = [0, *accumulate(lens)]
    row = next(row for row, start in enumerate(starts) if start + lens[row] > tokens)
    inside = tokens - starts[row]  # the tokens in the first half of the row with which the second begins
    cut = [inside] if inside else []
    last = [ends[row] - lens[row] + inside] if inside else []
    rows = row + len(cut)
    first = _piece(context, slice(tokens), slice(rows), [*lens[:row], *cut], [*ends[:row], *last])
    rest = [lens[row] - inside, *lens[row + 1 :]]
    second = _piece(context, slice(tokens, None), slice(row, None), rest, ends[row:])
    left = [total - first for first, total in zip(first_halves, totals, strict=True)]
    return replace(first, replica_tokens=list(first_halves)), replace(second, replica_tokens=left)


def _piece(
    context: ForwardContext, tokens: slice, rows: slice, counts: list[int], ends: list[int]
) -> ForwardContext:
    """Some tokens and rows of a step. `counts`, `ends`: the tokens of each row here, and until its end."""
    target = context.positions.device
    types = context.token_types
    return replace(
        context,
        positions=context.positions[tokens],
        query_starts=_on_device([0, *accumulate(counts)], target),
        kv_lens=_on_device(ends, target),
        # Copies begin at addresses for which kernels are compiled, pieces may begin anywhere.
        block_table=context.block_table[rows].clone(),
        slot_mapping=context.slot_mapping[tokens].clone(),
        query_lens_host=counts,
        kv_lens_host=ends,
        token_types=None if types is None else types[tokens],
        plan=None,
    )


def _on_device(values: list[int], target: torch.device) -> torch.Tensor:
    """These numbers as int32, without waiting for what the device has to do."""
    pinned = target.type == "cuda"
    return torch.tensor(values, dtype=torch.int32, pin_memory=pinned).to(target, non_blocking=True)
