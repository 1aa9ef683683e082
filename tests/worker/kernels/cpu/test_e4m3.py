"""Matrices of numbers in e4m3: every code, sums in one order, and the C kernels against exact products."""

from __future__ import annotations

import pytest
import torch
from forms import E4M3_CODES as CODES
from forms import drawn_e4m3
from kernel_levels import linear_table
from torch import Tensor

from models.ops.grouped_matrix import Grouped
from models.ops.tree_sum import add_in_pairs
from models.weight_coding import E4M3
from worker.kernels.cpu import torch_operations
from worker.kernels.cpu.operations import Table
from worker.kernels.cpu.packing import Packed
from worker.kernels.cpu.quantization import Quantized


@pytest.fixture
def table(level: str) -> Table:
    return linear_table(level)


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
    matrix = drawn_e4m3(70, 333, group, dtype)
    packed, specified = table["pack"](matrix), torch_operations.linear_operations(None)["pack"](matrix)
    assert isinstance(packed, Packed)
    assert isinstance(specified, Quantized)
    for rows in (1, 3, 5, 12, 13, 40):
        x = torch.randn(rows, 333).to(dtype)
        expected = exact(x, matrix)
        for out in (table["linear"](x, packed, wide=True), torch_operations.linear(x, specified, wide=True)):
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_sections_are_added_up_as_ranks_do(table: Table) -> None:
    matrix, x = drawn_e4m3(40, 8 * 48, group=0), torch.randn(5, 8 * 48)
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
