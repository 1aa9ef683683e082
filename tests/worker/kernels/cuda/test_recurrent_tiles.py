"""Prompts of layers with states, in tiles of tokens by Triton, against float64.

What a step must not read is NaN: numbers beside its inputs, and other places of states. In float32 results
differ from float64 by roundings of sums of some hundred products, of 2^-24 each. In bfloat16 states, what is
learnt and the matrices of a tile are cut to 8 bits before each of five products (cards round them).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interpreted import DEVICE, assert_near  # before any kernel is imported
from paged import make_step
from torch import Tensor

from models.context import ForwardContext, StateRows
from models.ops import recurrent_ops
from models.state_rows import MOST_KEPT, StateRow, state_columns
from worker.kernels.compare_with_reference import moved
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.launch import collecting
from worker.kernels.cuda.operations import cuda_operations
from worker.kernels.cuda.recurrent import sequences

LARGE, SMALL = Card(90, 132), Card(89, 128)
"""Cards on which tiles have 64 tokens, and 32."""
SHAPE = (1, 1, 24, 10)
"""Key heads or groups, heads, and the widths of keys and values."""


class Row(NamedTuple):
    """New tokens of a sequence, those before them, and after how many of them states are kept."""

    new: int
    before: int = 0
    kept: tuple[int, ...] = ()


class Layer(NamedTuple):
    """An operation, what it is given before and behind the states, and the sizes of a state."""

    operation: str
    inputs: tuple[Any, ...]
    options: tuple[Any, ...]
    state: tuple[int, int, int]


@pytest.fixture
def exact_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute float32 in tiles, too, which a worker does not."""
    monkeypatch.setattr(sequences, "EXACT", set())


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


def beside_nan(tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    wide = torch.full((tokens + 2, width + 8), torch.nan, dtype=dtype, device=DEVICE)
    wide[:tokens, :width] = values(tokens, width, dtype=dtype)
    return wide[:tokens, :width]


def delta(
    tokens: int, dtype: torch.dtype, shape: tuple[int, ...] = SHAPE, takes_turns: bool = False
) -> Layer:
    key_heads, heads, key_dim, value_dim = shape
    x = beside_nan(tokens, 2 * key_heads * key_dim + heads * value_dim, dtype)
    numbers = beside_nan(tokens, 2 * heads, dtype), -values(heads).abs(), values(heads)
    return Layer("gated_delta", (x, *numbers), (key_heads, takes_turns, 2.0), (heads, key_dim, value_dim))


def scan(tokens: int, dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> Layer:
    groups, heads, size, width = shape
    x, steps = beside_nan(tokens, heads * width + 2 * groups * size, dtype), beside_nan(tokens, heads, dtype)
    numbers = -values(heads).abs(), values(heads), values(heads)
    return Layer("selective_scan", (x, steps, *numbers, (0.01, 2.0)), (groups,), (heads, size, width))


def step_of(rows: Sequence[Row]) -> ForwardContext:
    """A step whose row i reads and writes place i, and keeps states in places behind those of all rows."""
    found: list[StateRow] = []
    place = len(rows)
    for number, row in enumerate(rows):
        found.append(StateRow(number, number, tuple(zip(row.kept, range(place, 99), strict=False))))
        place += len(row.kept)
    table = torch.tensor(state_columns(found), dtype=torch.int32)
    new, total = [row.new for row in rows], [row.new + row.before for row in rows]
    return moved(replace(make_step(new, total, 64), states=StateRows(table, found)), DEVICE)


def states_of(layer: Layer, rows: Sequence[Row]) -> Tensor:
    """Places for the states of rows and for those that are kept, and one that nobody uses."""
    used = len(rows) + sum(len(row.kept) for row in rows)
    states = torch.full((used + 1, *layer.state), torch.nan, device=DEVICE)
    for number, row in enumerate(rows):
        if row.before:
            states[number] = values(*layer.state) / 4
    return states


def computed(layer: Layer, states: Tensor, step: ForwardContext, card: Card = LARGE) -> Tensor:
    return cuda_operations(card)[layer.operation](*layer.inputs, states, step, *layer.options)


def assert_right(layer: Layer, rows: Sequence[Row], card: Card = LARGE) -> None:
    states, step = states_of(layer, rows), step_of(rows)
    exact = states.double()
    wide = [each.double() if isinstance(each, Tensor) else each for each in layer.inputs]
    out = computed(layer, states, step, card)
    expected = getattr(recurrent_ops, layer.operation)(*wide, exact, step, *layer.options)
    for found, wanted in ((out, expected), (states[:-1], exact[:-1])):  # sums of numbers that are not small
        most = float(wanted.abs().max().clamp(min=1))
        assert_near((found / most).to(out.dtype), wanted / most)
    assert states[-1].isnan().all()


@st.composite
def any_rows(draw: st.DrawFn) -> list[Row]:
    """Rows of any lengths, with states kept after some of their tokens, in any order."""
    rows: list[Row] = []
    for new in draw(st.lists(st.integers(1, 300), min_size=1, max_size=2)):
        kept = draw(st.lists(st.integers(1, new), max_size=MOST_KEPT, unique=True))
        rows.append(Row(new, draw(st.sampled_from([0, 3])), tuple(kept)))
    return rows


ANY = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@ANY
@given(any_rows(), st.sampled_from([LARGE, SMALL]))
def test_the_delta_rule_of_any_rows_is_exact(exact_tiles: None, rows: list[Row], card: Card) -> None:
    assert_right(delta(sum(row.new for row in rows), torch.float32), rows, card)


@ANY
@given(any_rows(), st.sampled_from([LARGE, SMALL]))
def test_the_scan_of_any_rows_is_exact(exact_tiles: None, rows: list[Row], card: Card) -> None:
    assert_right(scan(sum(row.new for row in rows), torch.float32), rows, card)


@pytest.mark.parametrize("card", [LARGE, SMALL])
@pytest.mark.parametrize("shape", [(2, 4, 64, 5), (1, 1, 128, 40), (1, 1, 256, 20)])
def test_heads_of_all_widths_in_bfloat16(shape: tuple[int, ...], card: Card) -> None:
    rows = [Row(5, 2), Row(70, 9, (70, 33)), Row(16)]
    assert_right(delta(91, torch.bfloat16, shape, takes_turns=True), rows, card)
    assert_right(scan(91, torch.bfloat16, shape), rows, card)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("make", [delta, scan])
def test_numbers_that_are_not_finite_stay_in_their_row(make: Any) -> None:
    rows, layer = [Row(20), Row(30, 1)], make(50, torch.bfloat16)
    states = states_of(layer, rows)
    again = states.clone()
    out = computed(layer, states, step_of(rows))
    layer.inputs[0][3], layer.inputs[1][7] = torch.nan, torch.nan
    spoiled = computed(layer, again, step_of(rows))
    assert spoiled[3:20].isnan().all() and again[0].isnan().all()
    assert torch.equal(spoiled[20:], out[20:]) and torch.equal(again[1], states[1])


@pytest.mark.parametrize(("gate", "speed"), [(9.0, -1e-3), (9.0, -9.0), (-9.0, -1e-3)])
def test_keys_that_repeat_are_learnt_as_token_by_token(exact_tiles: None, gate: float, speed: float) -> None:
    """All keys are the same, at large rates and small ones, with states that stay and that fade at once."""
    layer = delta(70, torch.float32)
    x, gates, speeds, _ = layer.inputs
    x[:, 24:48] = x[:1, 24:48].clone()
    gates[:, 0], speeds[:] = gate / 3, speed
    assert_right(layer._replace(options=(1, False, 1.0)), [Row(70)])


def test_only_kernels_that_have_rows_are_started() -> None:
    """Steps of single tokens and those in float32 have one launch, prompts alone two."""

    def started(
        rows: Sequence[int], dtype: torch.dtype = torch.bfloat16, single: bool | None = None
    ) -> list[str]:
        layer, step = delta(sum(rows), dtype), step_of([Row(new) for new in rows])
        assert step.states is not None
        if single is not None:
            step.states = StateRows(step.states.table, [], single)
        with collecting() as calls:
            computed(layer, states_of(layer, [Row(new) for new in rows]), step)
        return [call.kernel.fn.__name__ for call in calls]

    assert started([1] * 40) == started([1] * 40, single=True) == started([20], torch.float32) == ["learn"]
    assert started([40, 32]) == ["solve_tiles", "learn_tiles"]
    assert started([40, 1]) == started([1] * 40, single=False) == ["solve_tiles", "learn_tiles", "learn"]
