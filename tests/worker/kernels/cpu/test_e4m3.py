"""Matrices of numbers in e4m3: every code, sums in one order, and the C kernels against exact products."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kernel_levels import NAMES, library_of, use_threads
from torch import Tensor

from models.ops.grouped_matrix import Grouped
from models.weight_coding import E4M3
from worker.kernels.cpu import linear, quantized
from worker.kernels.cpu.operations import Table
from worker.kernels.cpu.packing import Packed
from worker.kernels.cpu.quantized import Quantized, add_in_pairs

CODES = [code for code in range(256) if code & 127 != 127]
"""All codes but the two that are no number."""


@pytest.fixture(params=NAMES)
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    torch.manual_seed(0)
    use_threads(request.param, 2)
    yield linear.bind(library_of(request.param))
    use_threads(request.param, 1)


def drawn(outputs: int, inputs: int, group: int = 128, dtype: torch.dtype = torch.float32) -> Grouped:
    codes = torch.tensor(CODES, dtype=torch.uint8)[torch.randint(len(CODES), (outputs, inputs))]
    scales = torch.rand(outputs, -(-inputs // (group or inputs))) / 256
    return Grouped(codes, 8, group, scales, None, inputs, dtype, kind=E4M3)


def exact(x: Tensor, matrix: Grouped) -> Tensor:
    return (x.double() @ matrix.widened(torch.float64).t()).float()


def test_every_code_is_exact(table: Table) -> None:
    """Also those without a leading 1, the smallest of which is 2^-9."""
    codes = torch.tensor([CODES], dtype=torch.uint8)
    matrix = Grouped(codes, 8, 0, torch.ones(1, 1), None, len(CODES), torch.float32, kind=E4M3)
    found = table["linear"](torch.eye(len(CODES)), table["pack"](matrix))
    assert torch.equal(found[:, 0], codes[0].view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("group", [32, 128, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_exact_up_to_the_sum(table: Table, group: int, dtype: torch.dtype) -> None:
    matrix = drawn(70, 333, group, dtype)
    packed, specified = table["pack"](matrix), quantized.table(None)["pack"](matrix)
    assert isinstance(packed, Packed)
    assert isinstance(specified, Quantized)
    for rows in (1, 3, 5, 12, 13, 40):
        x = torch.randn(rows, 333).to(dtype)
        expected = exact(x, matrix)
        for out in (table["linear"](x, packed, wide=True), quantized.linear(x, specified, wide=True)):
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_a_row_has_the_same_bits_everywhere() -> None:
    """Alone, in any batch, and on every kind of processor."""
    torch.manual_seed(0)
    matrix, x = drawn(100, 515), torch.randn(300, 515)
    found: list[Tensor] = []
    for level in NAMES:
        table = linear.bind(library_of(level))
        packed = table["pack"](matrix)
        found.append(table["linear"](x, packed))
        for rows in (1, 2, 3, 11, 12, 13, 25):
            assert torch.equal(table["linear"](x[-rows:], packed), found[0][-rows:]), (level, rows)
    assert all(torch.equal(other, found[0]) for other in found[1:])


def test_sections_are_added_up_as_ranks_do(table: Table) -> None:
    matrix, x = drawn(40, 8 * 48, group=0), torch.randn(5, 8 * 48)
    whole = table["linear"](x, table["pack"](matrix, sections=8), wide=True)
    halves = [
        table["linear"](piece, table["pack"](half, sections=4), wide=True)
        for piece, half in zip(x.chunk(2, dim=1), _halves(matrix), strict=True)
    ]
    assert torch.equal(add_in_pairs(halves), whole)


def _halves(matrix: Grouped) -> list[Grouped]:
    pieces = matrix.codes.chunk(2, dim=1)
    width = matrix.inputs // 2
    return [Grouped(piece, 8, 0, matrix.scales, None, width, matrix.dtype, kind=E4M3) for piece in pieces]


def test_infinity_and_nan_stay_in_their_row(table: Table) -> None:
    packed, x = table["pack"](drawn(40, 133)), torch.randn(20, 133)
    clean = table["linear"](x, packed)
    x[7, 132] = torch.nan
    out = table["linear"](x, packed)
    assert out[7].isnan().all()
    out[7] = clean[7]
    assert torch.equal(out, clean)
