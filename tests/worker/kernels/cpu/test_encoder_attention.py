"""Attention of encoders by the C kernels, for every level that this machine can run."""

import pytest
import torch
from paged import assert_near, fused, make_step
from torch import Tensor

from models.ops import encoder_ops
from models.ops.encoder_ops import Distances
from worker.kernels.cpu.operations import Table

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


def far(count: int, longest: int) -> Tensor:
    """The row of each distance: near ones have their own, farther ones share some."""
    distance = torch.arange(1 - longest, longest)
    near = distance.abs() < count // 4
    return (
        (torch.where(near, distance, distance.sign() * (count // 4 + distance.abs() // 9)) + count // 2)
        .clamp(0, count - 1)
        .int()
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compared", ["keys", "queries", "both"])
def test_distances_that_are_compared(table: Table, dtype: torch.dtype, compared: str) -> None:
    """A text has the same bits alone, too."""
    heads, dim, count = 3, 40, 160
    qkv = fused(sum(LENGTHS), heads, heads, dim, dtype)
    keys, queries = (
        torch.randn(heads, count, dim).to(dtype) if compared in (name, "both") else None
        for name in ("keys", "queries")
    )
    distances = Distances(keys, queries, far(count, 301))
    out = table["disentangled_attention"](*qkv, make_step(LENGTHS, LENGTHS, 1), distances, scale=0.1)
    wide, other = (None if each is None else each.double() for each in (keys, queries))
    q, k, v = (x.double() for x in qkv)
    step, doubles = make_step(LENGTHS, LENGTHS, 1), Distances(wide, other, distances.rows)
    exact = encoder_ops.disentangled_attention(q, k, v, step, doubles, scale=0.1)
    assert_near(out, exact)
    for q, k, v, expected in zip(*(x.split(LENGTHS) for x in (*qkv, out)), strict=True):
        step = make_step([len(q)], [len(q)], 1)
        assert torch.equal(table["disentangled_attention"](q, k, v, step, distances, scale=0.1), expected)


def test_texts_longer_than_distances_are_refused(table: Table) -> None:
    q, k, v = fused(sum(LENGTHS), 2, 2, 32, torch.float32)
    distances = Distances(torch.randn(2, 8, 32), None, far(8, 200))
    with pytest.raises(ValueError, match="disentangled_attention"):
        table["disentangled_attention"](q, k, v, make_step(LENGTHS, LENGTHS, 1), distances, scale=0.2)
