"""Attention of encoders by the C kernels, for every level that this machine can run."""

from __future__ import annotations

import pytest
import torch
from paged import assert_near, fused, make_step

from models.ops import encoder_ops
from worker.kernels.cpu.operations import Table

pytestmark = pytest.mark.slow(2)

DTYPES = [torch.float32, torch.bfloat16]
LENGTHS = [7, 1, 300, 64, 20]
REACH = 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 0, 3, 64, 299])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(12, 12, 32), (6, 2, 64), (2, 2, 8), (3, 3, 128)])
def test_equals_the_reference(
    table: Table, dtype: torch.dtype, window: int | None, heads: int, kv_heads: int, dim: int
) -> None:
    step, qkv = make_step(LENGTHS, LENGTHS, 1), fused(sum(LENGTHS), heads, kv_heads, dim, dtype)
    q, k, v = (x.double() for x in qkv)
    for causal in (False, True):
        limits = {"window": window, "causal": causal}
        exact = encoder_ops.encoder_attention(q, k, v, step, scale=0.2, **limits)
        assert_near(table["encoder_attention"](*qkv, step, scale=0.2, **limits), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 80])
@pytest.mark.parametrize("reach", [0, REACH, 128])
def test_biases_by_distance(table: Table, dtype: torch.dtype, window: int | None, reach: int) -> None:
    step, qkv = make_step(LENGTHS, LENGTHS, 1), fused(sum(LENGTHS), 4, 4, 32, dtype)
    bias = torch.randn(4, 2 * reach + 1).to(dtype)
    q, k, v = (x.double() for x in qkv)
    exact = encoder_ops.encoder_attention(q, k, v, step, scale=0.2, window=window, bias=bias.double())
    assert_near(table["encoder_attention"](*qkv, step, scale=0.2, window=window, bias=bias), exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_text_has_the_same_bits_in_any_batch(table: Table, dtype: torch.dtype) -> None:
    qkv, bias = fused(sum(LENGTHS), 3, 3, 32, dtype), torch.randn(3, 2 * REACH + 1)
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
    q, k, v = fused(sum(LENGTHS), 2, 2, 32, torch.float32)
    k[3], v[3] = torch.nan, torch.nan
    out = table["encoder_attention"](q, k, v, make_step(LENGTHS, LENGTHS, 1), scale=0.2)
    assert out[: LENGTHS[0]].isnan().all()
    assert out[LENGTHS[0] :].isfinite().all()


@pytest.mark.parametrize(("heads", "kv_heads", "dtype"), [(2, 2, torch.float16), (4, 2, torch.float32)])
def test_the_reference_computes_what_the_kernels_cannot(
    table: Table, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    """float16, and biases if heads share keys."""
    step, qkv = make_step(LENGTHS, LENGTHS, 1), fused(sum(LENGTHS), heads, kv_heads, 32, dtype)
    bias = torch.randn(heads, 2 * REACH + 1)
    expected = encoder_ops.encoder_attention(*qkv, step, scale=0.2, bias=bias)
    assert torch.equal(table["encoder_attention"](*qkv, step, scale=0.2, bias=bias), expected)
