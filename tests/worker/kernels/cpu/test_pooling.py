"""Means and rows of length 1 by the C kernels against float64, for every level that this machine can run."""

from __future__ import annotations

import pytest
import torch
from kernel_levels import NAMES, table_of, use_threads

from models.ops import reference
from worker.kernels.cpu.operations import Table

WIDTHS = [1, 7, 16, 64, 67, 384]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=NAMES)
def table(request: pytest.FixtureRequest) -> Table:
    torch.manual_seed(0)
    use_threads(request.param, 2)
    return table_of(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 2, 300])
def test_means(table: Table, dtype: torch.dtype, width: int, rows: int) -> None:
    x = (torch.randn(rows, width) + 1).to(dtype)
    out = table["mean"](x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), reference.mean(x.double()).double(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_mean_has_the_same_bits_in_any_memory_and_by_any_threads(table: Table, width: int) -> None:
    """The text is long enough for both threads, and a part of wider rows."""
    x = torch.randn(3000, width + 3)
    alone = table["mean"](x[100:2900, 1:-2].contiguous())
    assert torch.equal(table["mean"](x[100:2900, 1:-2]), alone)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 5, 3000])
def test_rows_of_length_1(table: Table, width: int, rows: int) -> None:
    x = torch.randn(rows, width + 1) * 3
    x[0] = 0
    for given in (x[:, :-1], x[:, 1:].contiguous()):
        expected = torch.nn.functional.normalize(given.double(), dim=-1)
        torch.testing.assert_close(table["normalize"](given).double(), expected, rtol=1e-6, atol=1e-6)


def test_infinity_and_nan_are_kept(table: Table) -> None:
    x = torch.ones(4, 20)
    x[1, 17], x[2, 3] = torch.nan, torch.inf
    assert table["mean"](x).isfinite().tolist()[0] == [i not in (3, 17) for i in range(20)]
    assert table["normalize"](x).isfinite().all(1).tolist() == [True, False, False, True]


def test_the_reference_computes_columns_apart_in_memory(table: Table) -> None:
    x = torch.randn(20, 30).t()
    assert torch.equal(table["mean"](x), reference.mean(x))
    assert torch.equal(table["normalize"](x), reference.normalize(x))
