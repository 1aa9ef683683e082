"""Products of small codes with rounded inputs, over shapes, sections and numbers that instructions cut."""

from dataclasses import replace

import pytest
import torch
from forms import FORMS, Shape, drawn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_levels import linear_table
from torch import Tensor

from models.ops.grouped_matrix import Grouped
from worker.kernels.cpu import torch_operations
from worker.kernels.cpu.operations import Table
from worker.kernels.cpu.quantization import Quantized, round_inputs

PLAIN = torch_operations.linear_operations(None)
NAMES = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "mxfp4", "W4A8", "W8A8")
GROUPS = (8, 16, 32, 64, 128, 0)


@pytest.fixture
def table(level: str) -> Table:
    return linear_table(level)


def made(name: str, shape: Shape, group: int) -> Grouped:
    if name in FORMS:
        return FORMS[name](shape)
    given = {"dtype": shape.dtype, "group": group, "input_bits": shape.input_bits}
    return drawn(shape.outputs, shape.inputs, bits=int(name[1]), **given)


def at_an_end(matrix: Grouped, greatest: bool) -> Grouped:
    """The same form with the largest codes, scales and minimums, or with the least."""

    def end_of(numbers: Tensor) -> Tensor:
        if numbers.dtype not in (torch.uint8, torch.int8):
            return numbers
        low, high = (0, 63) if numbers.dtype == torch.uint8 else (-128, 127)
        return torch.full_like(numbers, high if greatest else low)

    codes = torch.full_like(matrix.codes, (1 << matrix.bits) - 1 if greatest else 0)
    ends = matrix.each(end_of)
    # Least minimums and scales of Q4_K are zeros, which nothing could cut.
    return replace(ends if greatest or matrix.minimums is None else matrix, codes=codes)


def assert_specified(table: Table, matrix: Grouped, x: Tensor, sections: int | None) -> None:
    packed, specified = (each["pack"](matrix, sections=sections) for each in (table, PLAIN))
    out = table["linear"](x, packed, wide=True)
    expected = PLAIN["linear"](x, specified, wide=True)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    for count in (1, min(5, len(x))):
        alone = torch.cat([table["linear"](rows, packed, wide=True) for rows in x.split(count)])
        assert torch.equal(alone, out), "a row has the same bits in any batch"


@given(
    name=st.sampled_from(NAMES),
    group=st.sampled_from(GROUPS),
    outputs=st.integers(1, 100),
    inputs=st.integers(1, 80),
    sections=st.sampled_from([None, 1, 2, 8]),
    input_bits=st.sampled_from([8, 8, 16]),
    rows=st.integers(1, 70),
    end=st.sampled_from([None, True, False]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_products_are_those_specified(
    table: Table,
    name: str,
    group: int,
    outputs: int,
    inputs: int,
    sections: int | None,
    input_bits: int,
    rows: int,
    end: bool | None,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    matrix = made(name, Shape(outputs, 16 * inputs, torch.bfloat16, input_bits), group)
    x = torch.randn(rows, 16 * inputs) * torch.randn(rows, inputs).mul(3).exp().repeat_interleave(16, 1)
    if end is not None:
        matrix, x = at_an_end(matrix, end), torch.ones_like(x) * (-1) ** rows
    assert_specified(table, matrix, x.bfloat16(), sections)


def test_inputs_of_a_run_are_rounded_on_one_scale() -> None:
    """Where scales are whole numbers, but not where codes or inputs are of another kind."""
    shape = Shape(3, 512, torch.bfloat16, 8)
    rounded = {name: Quantized.kept(form(shape)).scheme.group for name, form in FORMS.items()}
    of_runs = dict.fromkeys(("Q4_K", "Q5_K", "Q6_K"), 256)
    assert rounded == {**dict.fromkeys(FORMS, 32), "nf4": 64, "fp4": 64, **of_runs}
    assert Quantized.kept(FORMS["Q6_K"](replace(shape, input_bits=16))).scheme.group == 16
    assert Quantized.kept(FORMS["Q6_K"](shape), 8).scheme.group == 64, "sections of 64 inputs"


def test_small_groups_keep_their_digits_beside_large_ones() -> None:
    """A group is off by its own largest number over 127 at most, or by the run's over 127 * 128."""
    scheme = Quantized.kept(FORMS["Q4_0"](Shape(3, 512, torch.float32, 8))).scheme
    x = (torch.randn(5, 16, 1).mul(4).exp() * torch.randn(5, 16, 32)).flatten(1)
    x[0, :64] = 0
    off = (round_inputs(x, scheme) - x).abs().view(5, 16, 32).amax(-1)
    tops = x.abs().view(5, 16, 32).amax(-1)
    least = tops.view(5, 2, 8).amax(-1).repeat_interleave(8, 1) / 128
    assert (off <= 1.001 * torch.maximum(tops, least) / 127).all()
    one_scale = round_inputs(x, replace(scheme, group=256, shifts=False))
    assert off.max() <= (one_scale - x).abs().max() * 1.001


def test_what_is_not_finite_is_seen(table: Table) -> None:
    for name in ("Q4_0", "Q4_K", "Q6_K"):
        packed = table["pack"](FORMS[name](Shape(40, 512, torch.bfloat16, 8)))
        for place in (0, 300, 511):
            x = torch.randn(3, 512).bfloat16()
            x[1, place] = torch.nan
            found = table["linear"](x, packed, wide=True).isnan()
            assert found[1].all()
            assert not found[[0, 2]].any()
