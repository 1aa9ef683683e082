"""Inputs that are rounded by the one scale that a checkpoint has for them, against the formula in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpreted import DEVICE  # before any kernel is imported
from torch import Tensor

from models.ops.grouped_matrix import Grouped, stacked
from models.weight_coding import E4M3
from worker.kernels import check
from worker.kernels.cuda import table
from worker.kernels.cuda.card import Card
from worker.kernels.cuda.products.rounded import describe_rounding
from worker.kernels.cuda.tiles import MANY_ROWS

BF16 = torch.bfloat16
SCALE = 0.01
"""With which numbers from 4.48 on become the largest one."""
ROWS = MANY_ROWS + 3


@pytest.fixture(autouse=True)
def _seed() -> None:  # pyright: ignore[reportUnusedFunction]
    torch.manual_seed(0)


def matrix(inputs: int, input_scale: float | None = SCALE) -> Grouped:
    codes = torch.randn(32, inputs).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(32, 1) + 0.5
    return Grouped(codes, 8, 0, scales, None, inputs, BF16, input_bits=8, input_scale=input_scale, kind=E4M3)


def inputs_of(rows: int, width: int) -> Tensor:
    x = torch.randn(rows, width) * 2
    x[3] *= 20
    assert (x > 448 * SCALE).any()
    return x.to(BF16)


def exact(x: Tensor, given: Grouped, scale: float) -> Tensor:
    numbers = (x.float() / torch.tensor(scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return numbers.double() * scale @ given.widened(torch.float64).t()


def assert_close(out: Tensor, expected: Tensor) -> None:
    error = (out.cpu().double() - expected).norm() / expected.norm()
    assert error < 2**-7, error


@pytest.mark.parametrize("scaled_mm", [True, False], ids=["by torch", "by Triton"])
@pytest.mark.parametrize("inputs", [300, 1100])
def test_inputs_of_long_steps_are_rounded_by_the_scale(inputs: int, scaled_mm: bool) -> None:
    operations, given = table.bind(Card(89, 4, scaled_mm=scaled_mm)), matrix(inputs)
    weight = operations["pack"](check.moved(given, DEVICE))
    x = inputs_of(ROWS, inputs)
    assert_close(operations["linear"](x.to(DEVICE), weight), exact(x, given, SCALE))
    few = x[: MANY_ROWS - 1]
    assert_close(
        operations["linear"](few.to(DEVICE), weight), few.double() @ given.widened(torch.float64).t()
    )


def test_rows_that_a_norm_rounded_by_scales_of_their_own_are_not_read() -> None:
    """Another matrix of the same width has no scale for its inputs."""
    operations, given = table.bind(Card(89, 4)), matrix(300)
    own, static = (
        operations["pack"](check.moved(each, DEVICE)) for each in (replace(given, input_scale=None), given)
    )
    weight = torch.full((300,), 3.0, dtype=BF16, device=DEVICE)
    x = operations["rms_norm"](inputs_of(ROWS, 300).to(DEVICE), weight, 1e-5)
    plain = x.clone().cpu()
    assert_close(operations["linear"](x, static), exact(plain, given, SCALE))
    assert torch.equal(operations["linear"](x, own), operations["linear"](x.clone(), own))
    assert not torch.equal(operations["linear"](x, own), operations["linear"](x, static))


def test_parts_of_a_matrix_share_the_largest_scale() -> None:
    """Nothing is cut off that would not be in a part by itself; without a scale of each there is none."""
    parts = [matrix(64, 0.5), matrix(64, 2.0), matrix(64, 1.0)]
    joined = stacked(parts)
    assert isinstance(joined, Grouped)
    assert joined.input_scale == 2
    joined = stacked([*parts, matrix(64, None)])
    assert isinstance(joined, Grouped)
    assert joined.input_scale is None


def test_scales_are_used_where_rows_have_one_scale() -> None:
    operations = table.bind(Card(89, 4))
    given = replace(matrix(256), group=128, scales=torch.rand(32, 2))
    for other in (given, replace(matrix(256), input_bits=16)):
        assert operations["pack"](check.moved(other, DEVICE)).input_scale is None


def test_the_log_counts_them() -> None:
    pack = table.bind(Card(89, 4))["pack"]
    weights = [pack(check.moved(each, DEVICE)) for each in (matrix(64), matrix(64, None), matrix(64))]
    line = describe_rounding(weights, 128)
    assert line is not None
    assert line.startswith(
        "inputs of 3 matrices in e4m3 are rounded to 8 bits in steps of 128 tokens and more"
    )
    assert ", 2 of them by scales of the checkpoint; in" in line
