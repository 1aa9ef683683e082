"""Attention of encoders by the C kernels, for every level that this machine can run."""

from __future__ import annotations

import pytest
import torch
from kernel_levels import NAMES, table_of, use_threads
from paged import make_step
from torch import Tensor

from models.ops import reference
from worker.kernels.cpu.operations import Table

DTYPES = [torch.float32, torch.bfloat16]
LENGTHS = [7, 1, 300, 64, 20]
REACH = 5


@pytest.fixture(params=NAMES)
def table(request: pytest.FixtureRequest) -> Table:
    torch.manual_seed(0)
    use_threads(request.param, 2)
    return table_of(request.param)


def fused(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views of one projection."""
    both = torch.randn(sum(LENGTHS), (heads + 2 * kv_heads) * dim).to(dtype)
    q, k, v = both.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    return q.view(-1, heads, dim), k.view(-1, kv_heads, dim), v.view(-1, kv_heads, dim)


def assert_near(out: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if out.dtype == torch.float32 else 2**-6
    torch.testing.assert_close(out.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 0, 3, 64, 299])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(12, 12, 32), (6, 2, 64), (2, 2, 8), (3, 3, 128)])
def test_equals_the_reference(
    table: Table, dtype: torch.dtype, window: int | None, heads: int, kv_heads: int, dim: int
) -> None:
    step, qkv = make_step(LENGTHS, LENGTHS, 1), fused(heads, kv_heads, dim, dtype)
    q, k, v = (x.double() for x in qkv)
    exact = reference.encoder_attention(q, k, v, step, scale=0.2, window=window)
    assert_near(table["encoder_attention"](*qkv, step, scale=0.2, window=window), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 80])
@pytest.mark.parametrize("reach", [0, REACH, 128])
def test_biases_by_distance(table: Table, dtype: torch.dtype, window: int | None, reach: int) -> None:
    step, qkv = make_step(LENGTHS, LENGTHS, 1), fused(4, 4, 32, dtype)
    bias = torch.randn(4, 2 * reach + 1).to(dtype)
    q, k, v = (x.double() for x in qkv)
    exact = reference.encoder_attention(q, k, v, step, scale=0.2, window=window, bias=bias.double())
    assert_near(table["encoder_attention"](*qkv, step, scale=0.2, window=window, bias=bias), exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_text_has_the_same_bits_in_any_batch(table: Table, dtype: torch.dtype) -> None:
    qkv, bias = fused(3, 3, 32, dtype), torch.randn(3, 2 * REACH + 1)
    for window, added in ((None, None), (3, None), (100, bias)):
        together = table["encoder_attention"](
            *qkv, make_step(LENGTHS, LENGTHS, 1), scale=0.2, window=window, bias=added
        )
        texts = zip(*(x.split(LENGTHS) for x in (*qkv, together)), strict=True)
        for q, k, v, expected in texts:
            step = make_step([len(q)], [len(q)], 1)
            alone = table["encoder_attention"](q, k, v, step, scale=0.2, window=window, bias=added)
            assert torch.equal(alone, expected)


def test_a_nan_stays_in_its_text(table: Table) -> None:
    q, k, v = fused(2, 2, 32, torch.float32)
    k[3], v[3] = torch.nan, torch.nan
    out = table["encoder_attention"](q, k, v, make_step(LENGTHS, LENGTHS, 1), scale=0.2)
    assert out[: LENGTHS[0]].isnan().all()
    assert out[LENGTHS[0] :].isfinite().all()


@pytest.mark.parametrize(("heads", "kv_heads", "dtype"), [(2, 2, torch.float16), (4, 2, torch.float32)])
def test_the_reference_computes_what_the_kernels_cannot(
    table: Table, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    """float16, and biases if heads share keys."""
    step, qkv = make_step(LENGTHS, LENGTHS, 1), fused(heads, kv_heads, 32, dtype)
    bias = torch.randn(heads, 2 * REACH + 1)
    expected = reference.encoder_attention(*qkv, step, scale=0.2, bias=bias)
    assert torch.equal(table["encoder_attention"](*qkv, step, scale=0.2, bias=bias), expected)
