"""Operations on states by Triton, against float64, with NaN in everything that must not be read.

A step in other pieces has the same bits and leaves the same states, and so has one that is filled up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from interpreted import DEVICE, assert_near  # before any kernel is imported
from paged import make_step
from torch import Tensor

from models.context import ForwardContext, StateRows
from models.ops import recurrent_ops
from models.state_rows import StateRow, state_columns
from worker.kernels.compare_with_reference import moved
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.operations import cuda_operations

OPERATIONS = cuda_operations(Card(90, 132))
DTYPES = [torch.float32, torch.bfloat16]
NEW, TOTAL = [7, 1, 5], [7, 4, 14]
"""Three sequences: one that begins, one that decodes, one that reads on."""
ROWS = (StateRow(2, 2, ((3, 5), (7, 6))), StateRow(0, 0), StateRow(3, 3, ((2, 7),)))
USED = [2, 0, 3, 5, 6, 7]
"""The places of their states, and those where some are kept."""
CUT = (
    ((3, 1, 2), (3, 4, 11), (StateRow(2, 5), StateRow(0, 0), StateRow(3, 7))),
    ((4, 1), (7, 12), (StateRow(5, 2, ((4, 6),)), StateRow(7, 1))),
    ((2,), (14,), (StateRow(1, 3),)),
)
"""Steps with the same tokens in other pieces: what was kept is where some of them begin, or end."""
TOKENS = ([0, 1, 2, 7, 8, 9], [3, 4, 5, 6, 10], [11, 12])
"""The tokens of these steps, by their numbers in the first one."""
COUNT, FILLED = sum(NEW), 16

Run = Callable[[Tensor, ForwardContext, Any], Tensor]
"""The type of a function that computes some tokens, whose numbers are the last argument, with their step."""


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


def beside_nan(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Random rows in wider ones, before others."""
    wide = torch.full((rows + 2, width + 8), torch.nan, dtype=dtype)
    wide[:rows, :width] = torch.randn(rows, width)
    return wide.to(DEVICE)[:rows, :width]


def states_of(*shape: int) -> Tensor:
    """States that lie apart, of which those that must not be read are NaN."""
    apart = torch.full((9, -(-prod(shape) // 16) * 16 + 16), torch.nan, device=DEVICE)
    states = apart[:, : prod(shape)].unflatten(1, shape)
    states[[0, 3]] = values(2, *shape) / 4
    return states


def step_of(
    new: Sequence[int] = NEW, total: Sequence[int] = TOTAL, rows: Sequence[StateRow] = ROWS
) -> ForwardContext:
    table = torch.tensor(state_columns(rows), dtype=torch.int32)
    step = replace(make_step(list(new), list(total), 4), states=StateRows(table, rows))
    return moved(step, DEVICE)


def filled_up() -> ForwardContext:
    """The step as a graph has it: with more tokens, and with a row that has none and names a place in use."""
    step, table = step_of(), torch.tensor(state_columns([*ROWS, StateRow(0, 0)]), dtype=torch.int32)
    starts, lens = ([*step.query_starts.tolist(), COUNT], [*TOTAL, 0])
    return replace(
        step,
        query_starts=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        kv_lens=torch.tensor(lens, dtype=torch.int32, device=DEVICE),
        states=StateRows(table.to(DEVICE), []),
    )


def assert_right(run: Run, reference: Run, states: Tensor, exact: Tensor, x: Tensor) -> None:
    """Compute a step by both, and by the kernel again in pieces and filled up. `x` has FILLED tokens."""
    before = states.clone()
    out = run(x[:COUNT], step_of(), slice(COUNT))
    expected = reference(x[:COUNT].double(), step_of(), slice(COUNT))
    after = states.clone()
    for found, wanted in ((out, expected), (after[USED], exact[USED])):  # sums of numbers that are not small
        most = float(wanted.abs().max().clamp(min=1))
        assert_near(found / most, wanted / most)
    assert after[[1, 4, 8]].isnan().all()
    states.copy_(before)
    filled = run(x, filled_up(), slice(FILLED))
    assert torch.equal(filled[:COUNT], out) and filled.isfinite().all()
    assert torch.equal(states[USED], after[USED])
    states.copy_(before)
    for cut, tokens in zip(CUT, TOKENS, strict=True):
        assert torch.equal(run(x[tokens], step_of(*cut), tokens), out[tokens])
    assert torch.equal(states[USED], after[USED])


@pytest.mark.parametrize(
    ("dtype", "shape", "takes_turns", "most_rate"),
    [
        (torch.float32, (1, 2, 24, 20), False, 2.0),
        (torch.bfloat16, (2, 4, 16, 5), False, 1.0),
        (torch.float32, (2, 4, 16, 5), True, 1.0),
    ],
)
def test_gated_delta(
    dtype: torch.dtype, shape: tuple[int, int, int, int], takes_turns: bool, most_rate: float
) -> None:
    """Key heads, value heads, and the widths of keys and values: whole slabs of columns and parts of them."""
    key_heads, heads, key_dim, value_dim = shape
    x = beside_nan(FILLED, 2 * key_heads * key_dim + heads * value_dim, dtype)
    gates, speeds, shifts = beside_nan(FILLED, 2 * heads, dtype), -values(heads).abs(), values(heads)
    states = states_of(heads, key_dim, value_dim)
    exact = states.double()
    options = (key_heads, takes_turns, most_rate)

    def run(x: Tensor, step: ForwardContext, rows: Any) -> Tensor:
        return OPERATIONS["gated_delta"](x, gates[rows], speeds, shifts, states, step, *options)

    def reference(x: Tensor, step: ForwardContext, rows: Any) -> Tensor:
        given = gates[rows].double(), speeds.double(), shifts.double()
        return recurrent_ops.gated_delta(x, *given, exact, step, *options)

    assert_right(run, reference, states, exact, x)


@pytest.mark.parametrize(
    ("dtype", "shape", "limits"),
    [
        (torch.float32, (1, 2, 24, 20), (0.0, float("inf"))),
        (torch.float32, (2, 4, 16, 5), (0.2, 0.9)),
        (torch.bfloat16, (2, 4, 16, 5), (0.0, float("inf"))),
    ],
)
def test_selective_scan(
    dtype: torch.dtype, shape: tuple[int, int, int, int], limits: tuple[float, float]
) -> None:
    """Groups, heads, and the widths of keys and values."""
    groups, heads, size, width = shape
    x = beside_nan(FILLED, heads * width + 2 * groups * size, dtype)
    times, speeds = 4 * beside_nan(FILLED, heads, dtype), -values(heads).abs()
    shifts, skips = values(heads), values(heads)
    states = states_of(heads, size, width)
    exact = states.double()

    def run(x: Tensor, step: ForwardContext, rows: Any) -> Tensor:
        given = speeds, shifts, skips, limits, states, step, groups
        return OPERATIONS["selective_scan"](x, times[rows], *given)

    def reference(x: Tensor, step: ForwardContext, rows: Any) -> Tensor:
        wide = (each.double() for each in (times[rows], speeds, shifts, skips))
        return recurrent_ops.selective_scan(x, *wide, limits, exact, step, groups)

    assert_right(run, reference, states, exact, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "taps", "kind"), [(140, 4, "silu"), (33, 3, None), (5, 2, "silu")])
def test_causal_conv(dtype: torch.dtype, channels: int, taps: int, kind: str | None) -> None:
    x, weight = beside_nan(FILLED, channels, dtype), values(taps, channels)
    bias = values(channels) if kind else None
    states = states_of(taps - 1, channels)
    exact = states.double()

    def run(x: Tensor, step: ForwardContext, rows: Any) -> Tensor:
        return OPERATIONS["causal_conv"](x, weight, bias, states, step, kind)

    def reference(x: Tensor, step: ForwardContext, rows: Any) -> Tensor:
        wide = None if bias is None else bias.double()
        return recurrent_ops.causal_conv(x, weight.double(), wide, exact, step, kind)

    assert_right(run, reference, states, exact, x)


def test_a_prompt_longer_than_a_tile_is_convolved() -> None:
    x, weight, states = beside_nan(37, 5, torch.float32), values(4, 5), states_of(3, 5)
    exact = states.double()
    step = step_of([37], [40], (StateRow(3, 3, ((20, 5),)),))
    out = OPERATIONS["causal_conv"](x, weight, None, states, step)
    assert_near(out, recurrent_ops.causal_conv(x.double(), weight.double(), None, exact, step))
    assert_near(states[[3, 5]], exact[[3, 5]])


def test_rows_of_any_length_are_convolved_together() -> None:
    """Rows begin anywhere in a tile, and states are written where they were read."""
    new = [1 + 7 * row % 5 for row in range(70)] + [40, 1]
    total = [count + row % 3 for row, count in enumerate(new)]
    rows = [StateRow(place, place) for place in range(len(new))]
    x, weight, states = beside_nan(sum(new), 5, torch.float32), values(4, 5), values(len(new), 3, 5)
    exact, before, step = states.double(), states.clone(), step_of(new, total, rows)
    out = OPERATIONS["causal_conv"](x, weight, None, states, step)
    assert_near(out, recurrent_ops.causal_conv(x.double(), weight.double(), None, exact, step))
    assert_near(states, exact)
    first = 0
    for row, (count, whole) in enumerate(zip(new, total, strict=True)):
        alone = before[row : row + 1].clone()
        step, tokens = step_of([count], [whole], [StateRow(0, 0)]), slice(first, first + count)
        assert torch.equal(OPERATIONS["causal_conv"](x[tokens], weight, None, alone, step), out[tokens])
        assert torch.equal(alone[0], states[row])
        first += count


def test_times_that_are_small_keep_their_digits() -> None:
    """Where e^x is small beside 1, the logarithm of their sum has few digits of it."""
    x, states = beside_nan(1, 1 + 2 * 16, torch.float32), states_of(1, 16, 1)
    numbers = torch.ones(1, device=DEVICE)
    steps = torch.full((1, 1), -13.0, device=DEVICE)
    given = -numbers, 0 * numbers, 0 * numbers, (0.0, 1.0)
    step = step_of([1], [1], (StateRow(2, 2),))
    OPERATIONS["selective_scan"](x, steps, *given, states, step, 1)
    expected = torch.tensor(-13.0).double().exp().log1p() * (x[0, 0] * x[0, 1:17]).double()
    torch.testing.assert_close(states[2, 0, :, 0].double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 67])
def test_gates(dtype: torch.dtype, width: int) -> None:
    x, gates = beside_nan(5, 3 * width, dtype), beside_nan(5, 3 * width, dtype)
    for kind in ("silu", "sigmoid", "identity", "gelu_tanh"):
        for given in (gates, gates[:, :3]):  # or one for each head
            expected = recurrent_ops.gate(x.double(), given.double(), kind)
            assert_near(OPERATIONS["gate"](x, given, kind), expected)
    for weight_type in {torch.float32, dtype}:
        weight = values(width, dtype=weight_type)
        expected = recurrent_ops.gated_norm(x.double(), gates.double(), weight.double(), 1e-3)
        assert_near(OPERATIONS["gated_norm"](x, gates, weight, 1e-3), expected)


def test_wide_rows_are_gated_in_pieces() -> None:
    x, gates = beside_nan(2, 1030, torch.float32), beside_nan(2, 1030, torch.float32)
    assert_near(OPERATIONS["gate"](x, gates, "silu"), recurrent_ops.gate(x.double(), gates.double(), "silu"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "width"), [(1, 64), (3, 67)])
@pytest.mark.parametrize("gated", [True, False])
def test_group_norms(dtype: torch.dtype, groups: int, width: int, gated: bool) -> None:
    x, gates = beside_nan(5, groups * width, dtype), beside_nan(5, groups * width, dtype)
    weight, before = values(groups * width), gates if gated else None
    squares = OPERATIONS["group_squares"](x, before, groups, 8 if groups == 1 else 1)
    exact = recurrent_ops.group_squares(x.double(), None if before is None else before.double(), groups, 1)
    torch.testing.assert_close(squares.double(), exact, rtol=4e-6, atol=0)
    expected = recurrent_ops.gated_group_norm(x.double(), gates.double(), weight.double(), exact, width, 1e-6)
    assert_near(OPERATIONS["gated_group_norm"](x, gates, weight, squares, width, 1e-6), expected)


def test_rows_that_are_not_contiguous_are_left_to_torch() -> None:
    """Each operation computes what the reference does with columns that lie two numbers apart."""
    for name, arguments in (
        ("gate", (values(3, 8)[:, ::2], values(3, 4), "silu")),
        ("gated_norm", (values(3, 8)[:, ::2], values(3, 4), values(2), 1e-5)),
        ("group_squares", (values(3, 8)[:, ::2], None, 2, 1)),
        ("gated_group_norm", (values(3, 8)[:, ::2], values(3, 4), values(4), values(3, 2).abs(), 2, 1e-5)),
    ):
        assert torch.equal(OPERATIONS[name](*arguments), getattr(recurrent_ops, name)(*arguments))
    step, row, one = step_of([2], [2], (StateRow(2, 2),)), values(2, 12)[:, ::2], values(1)
    for name, arguments in (
        ("causal_conv", (row, values(2, 6), None, values(3, 1, 6), step)),
        ("gated_delta", (row, values(2, 2), one, one, values(3, 1, 2, 2), step, 1)),
        ("selective_scan", (row, values(2, 1), one, one, one, (0.0, 1.0), values(3, 1, 2, 2), step, 1)),
    ):
        assert torch.equal(OPERATIONS[name](*arguments), getattr(recurrent_ops, name)(*arguments))
