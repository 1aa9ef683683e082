"""Operations on states by C kernels, against the reference in float64, for every level that can run here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_levels import BY_TURNS, table_of, use_threads
from paged import make_step
from torch import Tensor

from models.context import ForwardContext, StateRows
from models.ops import recurrent_ops
from models.state_rows import NOWHERE, StateRow, state_columns
from worker.kernels.cpu.operations import Table

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(2, 4, 128, 128), (2, 6, 24, 40), (2, 2, 16, 5), (2, 4, 64, 200)]
"""Key heads, value heads, and the widths of keys and values: whole slabs of columns and parts of them."""
NEW, TOTAL = [70, 1, 5], [70, 4, 14]
"""Three sequences: one that begins, one that decodes, one that reads on."""
ROWS = (StateRow(2, 2, ((33, 5), (70, 6))), StateRow(0, 0), StateRow(3, 3, ((2, 7),)))
USED = [2, 0, 3, 5, 6, 7]
"""The places of their states, and those where some are kept."""
CUT = (
    ((33, 1, 2), (33, 4, 11), (StateRow(2, 5), StateRow(0, 0), StateRow(3, 7))),
    ((37, 1), (70, 12), (StateRow(5, 2, ((37, 6),)), StateRow(7, 1))),
    ((2,), (14,), (StateRow(1, 3),)),
)
"""Steps with the same tokens in other pieces: what was kept is where some of them begin, or end."""
TOKENS = ([*range(33), 70, 71, 72], [*range(33, 70), 73], [74, 75])
"""The tokens of these steps, by their numbers in the first one."""

Run = Callable[[Tensor, ForwardContext, Any], Tensor]
"""The type of a function that computes some tokens, whose numbers are the last argument, with their step."""


@pytest.fixture(params=BY_TURNS)
def table(request: pytest.FixtureRequest) -> Table:
    torch.manual_seed(0)
    use_threads(request.param, 2)
    return table_of(request.param)


def states_of(*shape: int) -> Tensor:
    """States, of which that of the sequence that begins holds what must not be read."""
    states = torch.randn(9, *shape) / 4
    states[ROWS[0].source] = torch.nan
    return states


def step_of(
    new: Sequence[int] = NEW, total: Sequence[int] = TOTAL, rows: Sequence[StateRow] = ROWS
) -> ForwardContext:
    table = torch.tensor(state_columns(rows), dtype=torch.int32)
    return replace(make_step(list(new), list(total), 4), states=StateRows(table, rows))


def assert_rounded(out: Tensor, expected: Tensor) -> None:
    tolerance = 4e-6 if out.dtype == torch.float32 else 2**-8
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def assert_same_in_pieces(run: Run, states: Tensor, before: Tensor, whole: Tensor, x: Tensor) -> None:
    """Compute the tokens again in other steps, which must leave the same bits and the same states."""
    after = states.clone()
    states.copy_(before)
    for cut, tokens in zip(CUT, TOKENS, strict=True):
        assert torch.equal(run(x[tokens], step_of(*cut), tokens), whole[tokens])
    assert torch.equal(states[USED], after[USED])
    states.copy_(before)
    assert_same_with_guesses(run, states, whole, x)
    assert torch.equal(states[USED], after[USED])


def assert_same_with_guesses(run: Run, states: Tensor, whole: Tensor, x: Tensor) -> None:
    """Three tokens of the last sequence are guesses, of which the first two hold."""
    nothing = StateRow(NOWHERE, NOWHERE)
    guessing = StateRow(3, NOWHERE, ((2, 7), (2, 3)), 3)
    step = step_of([70, 1, 2, 1, 1, 1], [70, 4, 11, 12, 13, 14], (*ROWS[:2], guessing, *[nothing] * 3))
    assert torch.equal(run(x, step, slice(None)), whole)
    assert torch.equal(states[3], states[7])
    held = step_of([1, 3], [5, 14], (nothing, StateRow(3, 3, ((2, 8),), -1)))
    assert torch.equal(run(x[72:], held, slice(72, None))[1:3], whole[73:75])
    assert torch.equal(states[3], states[8])
    assert torch.equal(run(x[75:], step_of([1], [14], (StateRow(3, 3),)), slice(75, None)), whole[75:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "takes_turns"), list(zip(SHAPES, (False, True, True, False), strict=True)))
def test_gated_delta(
    table: Table, dtype: torch.dtype, shape: tuple[int, int, int, int], takes_turns: bool
) -> None:
    key_heads, heads, key_dim, value_dim = shape
    width, count = 2 * key_heads * key_dim + heads * value_dim, sum(NEW)
    x, gates = torch.randn(count, width + 8).to(dtype)[:, :width], torch.randn(count, 2 * heads).to(dtype)
    most_rate = 2.0 if takes_turns else 1.0
    speeds, shifts = -2 * torch.rand(heads), torch.randn(heads)
    states = states_of(heads, key_dim, value_dim)
    before, exact = states.clone(), states.double()

    def run(x: Tensor, step: ForwardContext, rows: Any) -> Tensor:
        return table["gated_delta"](
            x, gates[rows], speeds, shifts, states, step, key_heads, takes_turns, most_rate
        )

    out = run(x, step_of(), slice(None))
    expected = recurrent_ops.gated_delta(
        x.double(),
        gates.double(),
        speeds.double(),
        shifts.double(),
        exact,
        step_of(),
        key_heads,
        takes_turns,
        most_rate,
    )
    assert_rounded(out, expected)
    assert_rounded(states[USED], exact[USED])
    assert torch.equal(states[[1, 4, 8]], before[[1, 4, 8]])
    assert_same_in_pieces(run, states, before, out, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "key_dim", "value_dim"), [(2, 128, 128), (3, 24, 40), (2, 5, 200)])
def test_channel_delta(table: Table, dtype: torch.dtype, heads: int, key_dim: int, value_dim: int) -> None:
    keys, count = heads * key_dim, sum(NEW)
    width = 2 * keys + heads * value_dim
    x, gates = torch.randn(count, width + 8).to(dtype)[:, :width], torch.randn(count, heads + keys).to(dtype)
    speeds, shifts = -2 * torch.rand(heads), torch.randn(keys)
    states = states_of(heads, key_dim, value_dim)
    before, exact = states.clone(), states.double()

    def run(x: Tensor, step: ForwardContext, rows: Any) -> Tensor:
        return table["channel_delta"](
            x, *gates[rows].split([heads, keys], dim=1), speeds, shifts, states, step
        )

    out = run(x, step_of(), slice(None))
    wide = (x.double(), *gates.double().split([heads, keys], dim=1), speeds.double(), shifts.double())
    assert_rounded(out, recurrent_ops.channel_delta(*wide, exact, step_of()))
    assert_rounded(states[USED], exact[USED])
    assert torch.equal(states[[1, 4, 8]], before[[1, 4, 8]])
    assert_same_in_pieces(run, states, before, out, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "taps", "kind"), [(200, 4, "silu"), (33, 3, None), (5, 2, "silu")])
def test_causal_conv(table: Table, dtype: torch.dtype, channels: int, taps: int, kind: str | None) -> None:
    x = torch.randn(sum(NEW), channels).to(dtype)
    weight, bias = torch.randn(taps, channels), torch.randn(channels) if kind else None
    states = states_of(taps - 1, channels)
    before, exact = states.clone(), states.double()

    def run(x: Tensor, step: ForwardContext, rows: Any) -> Tensor:
        return table["causal_conv"](x, weight, bias, states, step, kind)

    out = run(x, step_of(), None)
    wide = None if bias is None else bias.double()
    assert_rounded(out, recurrent_ops.causal_conv(x.double(), weight.double(), wide, exact, step_of(), kind))
    assert_same_in_pieces(run, states, before, out, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 67])
def test_gates(table: Table, dtype: torch.dtype, width: int) -> None:
    x, gates = torch.randn(2, 9, 3 * width + 5).to(dtype)[:, :, : 3 * width]
    weight = torch.randn(width)
    for kind in ("silu", "sigmoid", "identity", "gelu_tanh"):
        for given in (gates, gates[:, :3]):  # or one for each head
            expected = recurrent_ops.gate(x.double(), given.double(), kind)
            assert_rounded(table["gate"](x, given, kind), expected)
    for given in {weight, weight.to(dtype)}:
        for kind in ("silu", "sigmoid"):
            expected = recurrent_ops.gated_norm(x.double(), gates.double(), given.double(), 1e-6, kind)
            assert_rounded(table["gated_norm"](x, gates, given, 1e-6, kind), expected)


def test_shapes_that_do_not_fit_are_refused(table: Table) -> None:
    x, states = torch.randn(sum(NEW), 20), states_of(2, 4, 4)
    with pytest.raises(ValueError, match="gated_delta: these tensors do not fit"):
        table["gated_delta"](x, x[:, :4], x[0, :2], x[0, :2], states, step_of(), 2)
    with pytest.raises(ValueError, match="channel_delta: these tensors do not fit"):
        table["channel_delta"](x, x[:, :2], x[:, :4], x[0, :2], x[0, :4], states_of(2, 4, 4), step_of())
    with pytest.raises(ValueError, match="selective_scan: these tensors do not fit"):
        table["selective_scan"](x, x[:, :3], *[x[0, :2]] * 3, (0.0, 1.0), states, step_of(), 1)
    with pytest.raises(ValueError, match="channel_scan: these tensors do not fit"):
        table["channel_scan"](x, x, x[:, :3], x[:, :4], x[:4], x[0], x[0], states_of(4, 20), step_of())
    with pytest.raises(ValueError, match="causal_conv: these tensors do not fit"):
        table["causal_conv"](x, torch.randn(4, 21), None, states_of(3, 21), step_of())
    with pytest.raises(ValueError, match="gate: these tensors do not fit"):
        table["gate"](x, x[:, :4], "silu")


SCANS = [(1, 4, 128, 64), (2, 6, 24, 40), (2, 2, 16, 5), (1, 3, 16, 200)]
"""Groups, heads, and the widths of keys and values: whole slabs of columns and parts of them."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SCANS)
@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.2, 0.9)])
def test_selective_scan(
    table: Table, dtype: torch.dtype, shape: tuple[int, int, int, int], limits: tuple[float, float]
) -> None:
    groups, heads, size, width = shape
    features, count = heads * width + 2 * groups * size, sum(NEW)
    x, times = torch.randn(count, features + 8).to(dtype)[:, :features], torch.randn(count, heads).to(dtype)
    speeds, shifts, skips = -2 * torch.rand(heads), torch.randn(heads), torch.randn(heads)
    states = states_of(heads, size, width)
    before, exact = states.clone(), states.double()

    def run(x: Tensor, step: ForwardContext, rows: Any) -> Tensor:
        steps = times[rows]
        return table["selective_scan"](x, steps, speeds, shifts, skips, limits, states, step, groups)

    out = run(x, step_of(), slice(None))
    wide = (x.double(), times.double(), speeds.double(), shifts.double(), skips.double())
    expected = recurrent_ops.selective_scan(*wide, limits, exact, step_of(), groups)
    for found, wanted in ((out, expected), (states[USED], exact[USED])):  # sums of numbers that are not small
        most = float(wanted.abs().max())
        assert_rounded(found / most, wanted / most)
    assert torch.equal(states[[1, 4, 8]], before[[1, 4, 8]])
    assert_same_in_pieces(run, states, before, out, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "channels"), [(16, 200), (24, 5), (1, 64)])
def test_channel_scan(table: Table, dtype: torch.dtype, size: int, channels: int) -> None:
    count = sum(NEW)
    x, steps = torch.randn(2, count, channels + 8).to(dtype)[:, :, :channels]
    keys, queries = torch.randn(count, 2 * size).to(dtype).chunk(2, dim=1)
    speeds, (shifts, skips) = -2 * torch.rand(size, channels), torch.randn(2, channels)
    states = states_of(size, channels)
    before, exact = states.clone(), states.double()

    def run(x: Tensor, step: ForwardContext, rows: Any) -> Tensor:
        vectors = (x, steps[rows], keys[rows], queries[rows])
        return table["channel_scan"](*vectors, speeds, shifts, skips, states, step)

    out = run(x, step_of(), slice(None))
    wide = (each.double() for each in (x, steps, keys, queries, speeds, shifts, skips))
    expected = recurrent_ops.channel_scan(*wide, exact, step_of())
    for found, wanted in ((out, expected), (states[USED], exact[USED])):
        most = float(wanted.abs().max())
        assert_rounded(found / most, wanted / most)
    assert torch.equal(states[[1, 4, 8]], before[[1, 4, 8]])
    assert_same_in_pieces(run, states, before, out, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "sections", "width"), [(1, 8, 64), (3, 1, 67), (2, 4, 40)])
@pytest.mark.parametrize("gated", [True, False])
def test_group_norms(
    table: Table, dtype: torch.dtype, groups: int, sections: int, width: int, gated: bool
) -> None:
    x, gates = torch.randn(2, 9, groups * width + 5).to(dtype)[:, :, : groups * width]
    weight, before = torch.randn(groups * width), gates if gated else None
    squares = table["group_squares"](x, before, groups, sections)
    exact = recurrent_ops.group_squares(x.double(), None if before is None else before.double(), groups, 1)
    torch.testing.assert_close(squares.double(), exact, rtol=4e-6, atol=0)
    expected = recurrent_ops.gated_group_norm(x.double(), gates.double(), weight.double(), exact, width, 1e-6)
    assert_rounded(table["gated_group_norm"](x, gates, weight, squares, width, 1e-6), expected)
