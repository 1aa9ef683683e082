"""A cache of 8 bits by the C kernels, for every level that this machine can run."""

import random
from typing import Any

import exact
import pytest
import torch
from by_pairs import by_pairs
from paged import STEPS, assert_near, fused, make_cache, make_step
from torch import Tensor

from models.context import ForwardContext
from models.ops import reference
from models.ops.attention_inputs import CODES, HeadPrep, rounded, rounded_queries, stored_shape, widened
from worker.kernels.cpu.operations import Table

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1, 8), (3, 2, 24), (8, 1, 40), (2, 2, 64), (5, 1, 96), (2, 2, 128), (4, 1, 256), (1, 1, 512)]
"""Query heads for each key head, key heads, dimensions."""

pytestmark = [pytest.mark.usefixtures("threads")]


def compare(
    table: Table, q: Tensor, kv: Tensor, step: ForwardContext, *, largest: float = 1.0, **limits: Any
) -> None:
    """Compare kernels and reference with the definition, for the numbers that the codes mean."""
    expected = exact.attention(rounded_queries(q), widened(kv, torch.float32), step, **limits)
    assert_near(reference.attention(q, kv, step, **limits), expected, largest)
    assert_near(table["attention"](q, kv, step, **limits), expected, largest)


def empty_cache(step: ForwardContext, kv_heads: int, dim: int) -> Tensor:
    shape = 2, step.block_table.numel(), kv_heads, step.block_size, dim
    return torch.zeros(stored_shape(shape, CODES), dtype=CODES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 24, 40, 64, 96, 128, 512])
def test_what_is_kept_has_the_bits_of_the_reference(table: Table, dtype: torch.dtype, dim: int) -> None:
    """Rows of zeros, of numbers too small for a scale, and of the largest ones among them."""
    step = make_step([1, 150, 2], [9, 150, 80], block_size=16)
    (q, k, v), phases = fused(153, 4, 2, dim, dtype), torch.randn(153, dim // 2)
    k[3], v[4], v[5], k[6] = 0, 1e-42, 1e-37, 1e36
    v[7, 1] *= 3e-3
    k[8, :, 1:] = 0
    kv, expected = empty_cache(step, 2, dim), empty_cache(step, 2, dim)
    for cos_sin in (None, torch.cat([phases.cos(), phases.sin()], dim=-1)):
        out = table["rotary_and_cache"](q, k, v, kv, step, HeadPrep(cos_sin))
        assert torch.equal(out, reference.rotary_and_cache(q, k, v, expected, step, HeadPrep(cos_sin)))
        assert torch.equal(kv, expected)


def test_numbers_that_are_normed_first_are_kept_as_the_model_has_them(table: Table) -> None:
    step = make_step([1, 30, 2], [9, 30, 80], block_size=16)
    q, k, v = fused(33, 4, 2, 72, torch.bfloat16)
    norm, plain = torch.rand(72) + 0.5, torch.zeros(2, step.block_table.numel(), 2, 16, 72).bfloat16()
    prep, kv = HeadPrep(None, norm, norm, 1e-5, norm), empty_cache(step, 2, 72)
    table["rotary_and_cache"](q, k, v, kv, step, prep)
    table["rotary_and_cache"](q, k, v, plain, step, prep)
    assert torch.equal(kv, rounded(plain, CODES))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_hidden(table: Table, bad: float) -> None:
    step = make_step([1, 30, 5], [9, 30, 40], block_size=16)
    (q, k, v), kv = fused(36, 4, 2, 64, torch.float32), make_cache(step, 2, 64, CODES)
    k[12, 0, 5] = v[33, 1, 63] = bad
    given = kv.clone()
    table["rotary_and_cache"](q, k, v, kv, step)
    reference.rotary_and_cache(q, k, v, given, step)
    assert torch.equal(widened(kv, torch.float32).isnan(), widened(given, torch.float32).isnan())
    out = table["attention"](q, kv, step, scale=0.1).isfinite().all(dim=-1)
    assert not out[12:31, :2].any()
    assert out[12:31, 2:].all()
    assert not out[33:, 2:].any()
    q[0, 1, 0] = bad
    assert not table["attention"](q, kv, step, scale=0.1)[0, 1].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("new", "total"), STEPS)
def test_equals_the_definition(table: Table, dtype: torch.dtype, new: list[int], total: list[int]) -> None:
    """Scales that no sequence wrote are NaN, and must not be read."""
    for number, (group, kv_heads, dim) in enumerate(SHAPES):
        step = make_step(new, total, block_size=(32, 16, 4)[number % 3])
        q = torch.randn(len(step.positions), group * kv_heads, dim).to(dtype)
        compare(table, q, make_cache(step, kv_heads, dim, CODES), step, scale=dim**-0.5)


@by_pairs(
    dtype=DTYPES, softcap=[None, 5.0], window=[None, 1, 70, 1000], added=["", "sinks", "slopes", "last"]
)
def test_equals_the_definition_with_every_limit(
    table: Table, dtype: torch.dtype, softcap: float | None, window: int | None, added: str
) -> None:
    step = make_step([1, 150, 1, 70, 3], [20, 290, 400, 70, 9], block_size=16)
    kv, q = make_cache(step, 2, 64, CODES), torch.randn(225, 6, 64).to(dtype)
    limits: dict[str, Any] = {"scale": 0.3, "window": window, "softcap": softcap}
    if added == "last":
        limits["last"] = step.positions.int()
        limits["last"][100:151] = limits["last"][150]
    elif added:
        limits[added] = torch.rand(6)
    compare(table, q, kv, step, **limits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_shapes_and_sizes_of_numbers(table: Table, dtype: torch.dtype) -> None:
    """Keys and values that differ by far between tokens and between heads; queries of zeros."""
    for _ in range(12):
        group, kv_heads, dim = random.choice(SHAPES)
        new = [random.choice([1, 1, random.randint(2, 90)]) for _ in range(random.randint(1, 4))]
        step = make_step(new, [each + random.randint(0, 300) for each in new], random.choice([4, 16, 32]))
        kv, q = make_cache(step, kv_heads, dim, CODES), torch.randn(sum(new), group * kv_heads, dim)
        held = widened(kv, torch.float32)
        held *= torch.randint(-6, 3, held.shape[:-1]).unsqueeze(-1).exp2()
        q[0] = 0
        compare(table, q.to(dtype), rounded(held, CODES), step, largest=4.0, scale=dim**-0.5)


def test_place_0_may_be_seen_by_none_but_itself(table: Table) -> None:
    step = make_step([3, 1, 40], [3, 1, 41], block_size=4)
    step.first = 1
    kv, q = make_cache(step, 2, 64, CODES), torch.randn(44, 6, 64)
    out = table["attention"](q, kv, step, scale=0.3)
    assert_near(out, reference.attention(q, kv, step, scale=0.3))


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float16, 64), (torch.float32, 12)])
def test_the_reference_computes_what_the_kernels_cannot(table: Table, dtype: torch.dtype, dim: int) -> None:
    step = make_step([1, 30], [9, 30], block_size=16)
    (q, k, v), kv = fused(31, 2, 1, dim, dtype), make_cache(step, 1, dim, CODES)
    expected = kv.clone()
    table["rotary_and_cache"](q, k, v, kv, step)
    reference.rotary_and_cache(q, k, v, expected, step)
    assert torch.equal(kv, expected)
    out = table["attention"](q, kv, step, scale=0.1)
    assert out.dtype == dtype
    assert torch.equal(out, reference.attention(q, kv, step, scale=0.1))


def test_rows_without_room_for_scales_are_refused(table: Table) -> None:
    step = make_step([1], [9], block_size=16)
    (q, k, v), kv = fused(1, 2, 1, 32, torch.float32), make_cache(step, 1, 32, torch.float32).to(CODES)
    with pytest.raises(ValueError, match="attention: these tensors do not fit"):
        table["attention"](q, kv, step, scale=0.1)
    with pytest.raises(ValueError, match="rotary_and_cache: these tensors do not fit"):
        table["rotary_and_cache"](q, k, v, kv, step)
