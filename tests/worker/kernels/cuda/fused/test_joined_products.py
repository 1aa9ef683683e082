"""Joined kernels of steps of few rows, against the kernels of the operations that they join."""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, assert_near, on_device
from paged import make_cache, make_step
from torch import Tensor

from models.ops import reference
from models.ops.attention_inputs import CacheScales, HeadPrep
from worker.kernels.cuda.capabilities import COUNTERS, Card
from worker.kernels.cuda.fused.largest import finds_largest
from worker.kernels.cuda.launch import collecting, joining
from worker.kernels.cuda.operations import cuda_operations

OPERATIONS = cuda_operations(Card(90, 132))
DTYPES = [torch.float32, torch.bfloat16]
FLOAT = torch.float32


def values(*shape: int, dtype: torch.dtype = FLOAT) -> Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


@pytest.fixture
def counters() -> Tensor:
    return torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 67, 40), (8, 300, 70)])
def test_a_product_and_its_sum(
    dtype: torch.dtype, rows: int, inputs: int, outputs: int, counters: Tensor
) -> None:
    x, residual, bias = (values(rows, width, dtype=dtype) for width in (inputs, outputs, outputs))
    weight = values(outputs, inputs, dtype=dtype) / inputs**0.5
    for given in (None, bias[0]):
        with joining(counters):
            out = OPERATIONS["add_product"](x, weight, residual, given)
        assert_near(out, residual + OPERATIONS["linear"](x, weight, given))
    assert not counters.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "kind"), [(1, "silu"), (7, "clamped")])
def test_a_norm_and_gates(dtype: torch.dtype, rows: int, kind: str, counters: Tensor) -> None:
    inputs, width = 290, 37
    x, norm = values(rows, inputs, dtype=dtype) * 3, values(inputs)
    weight, bias = values(2 * width, inputs, dtype=dtype) / 16, values(2 * width, dtype=dtype)
    for given in (None, bias):
        with joining(counters):
            out = OPERATIONS["project_gates"](x, norm, 1e-5, weight, kind, given)
        normed = OPERATIONS["rms_norm"](x, norm, 1e-5)
        assert_near(out, OPERATIONS["gated_linear"](normed, weight, given, kind))
    assert not counters.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "queries", "keys", "dim", "rotated", "normed", "biased"),
    [
        (1, 4, 2, 64, 64, True, False),
        (4, 3, 3, 40, 24, False, True),  # part of a head is rotated, and a tile is wider than what is left
        (8, 2, 1, 16, 0, True, True),
    ],
)
def test_a_norm_and_heads(
    dtype: torch.dtype,
    rows: int,
    queries: int,
    keys: int,
    dim: int,
    rotated: int,
    normed: bool,
    biased: bool,
    counters: Tensor,
) -> None:
    """Queries are the same, and what is written to the cache; nothing else of it changes."""
    step = on_device(make_step([1] * rows, [3 + 5 * row for row in range(rows)], 4))
    count, inputs = (queries + 2 * keys) * dim, 200
    x, norm = values(rows, inputs, dtype=dtype), values(inputs, dtype=dtype)
    weight, bias = values(count, inputs, dtype=dtype) / 16, values(count, dtype=dtype) if biased else None
    norms = (values(dim), values(dim)) if normed else (None, None)
    prep = HeadPrep(values(rows, rotated) if rotated else None, *norms, 1e-5)
    kv = make_cache(step, keys, dim, dtype).to(DEVICE)
    other = kv.clone()
    with joining(counters):
        q = OPERATIONS["project_heads"](x, norm, 1e-5, weight, kv, step, bias, prep)
    projected = OPERATIONS["linear"](OPERATIONS["rms_norm"](x, norm, 1e-5), weight, bias)
    heads = projected.unflatten(1, (-1, dim)).split([queries, keys, keys], dim=1)
    assert_near(q, OPERATIONS["rotary_and_cache"](*heads, other, step, prep))
    assert_near(kv.nan_to_num(7.0), other.nan_to_num(7.0))
    assert not counters.any()


def test_a_cache_of_8_bits(counters: Tensor) -> None:
    step, scales = on_device(make_step([1, 1], [5, 9], 4)), CacheScales(0.5, 2.0)
    x, norm, weight = values(2, 64), values(64), values(4 * 32, 64) / 8
    kv = torch.zeros(2, 8, 1, 4, 32, dtype=torch.float8_e5m2, device=DEVICE)
    other = kv.clone()
    with joining(counters):
        OPERATIONS["project_heads"](x, norm, 1e-5, weight, kv, step, None, HeadPrep(), scales)
    projected = OPERATIONS["linear"](OPERATIONS["rms_norm"](x, norm, 1e-5), weight)
    heads = projected.unflatten(1, (-1, 32)).split([2, 1, 1], dim=1)
    OPERATIONS["rotary_and_cache"](*heads, other, step, HeadPrep(), scales)
    assert other.float().any()
    torch.testing.assert_close(kv.float(), other.float(), atol=0, rtol=0.25)


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, 600), (torch.bfloat16, None)])
def test_the_last_split_of_keys_joins_all(dtype: torch.dtype, window: int | None, counters: Tensor) -> None:
    """A row of three splits beside one of a single split."""
    step = on_device(make_step([1, 1], [700, 40], 16))
    kv = make_cache(step, 2, 40, dtype).to(DEVICE)
    q = values(2, 6, 40, dtype=dtype)
    with joining(counters), collecting() as calls:
        OPERATIONS["attention"](q, kv, step, scale=0.2, window=window)
    assert [call.kernel.fn.__name__ for call in calls] == ["attend"]
    with joining(counters):
        out = OPERATIONS["attention"](q, kv, step, scale=0.2, window=window)
    assert_near(out, OPERATIONS["attention"](q, kv, step, scale=0.2, window=window))
    assert not counters.any()


def test_angles(counters: Tensor) -> None:
    positions = torch.tensor([0, 1, 2, 3, -5, 77, 100_000, 1_000_003], device=DEVICE)
    frequencies = 10000.0 ** (-torch.arange(40, device=DEVICE) / 40)
    with joining(counters):
        found = OPERATIONS["angles"](positions, frequencies, 1.3)
    torch.testing.assert_close(found, reference.angles(positions, frequencies, 1.3), atol=1e-6, rtol=0)


def test_the_likeliest_tokens() -> None:
    assert finds_largest(DEVICE)
