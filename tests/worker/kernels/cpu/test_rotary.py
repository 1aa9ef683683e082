"""Norms, rotation and caching of heads by the C kernels, for every level that this machine can run."""

from typing import Any

import pytest
import torch
from paged import fused, make_step
from torch import Tensor

from models.context import ForwardContext
from models.ops import reference
from models.ops.attention_inputs import HeadPrep
from worker.kernels.cpu.operations import Table

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(4, 2, 64, 64), (3, 1, 16, 6), (2, 2, 40, 40), (9, 3, 128, 32), (1, 1, 512, 512)]
"""Heads, key heads, dimensions, rotated dimensions."""
EPS = 1e-5


@pytest.fixture
def step() -> ForwardContext:
    return make_step([1, 150, 2], [9, 150, 80], block_size=16)


def angles(turned: int) -> Tensor:
    phases = torch.randn(153, turned // 2)
    return torch.cat([phases.cos(), phases.sin()], dim=-1)


def empty_cache(step: ForwardContext, kv_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(2, step.block_table.numel(), kv_heads, step.block_size, dim, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rotation_has_the_bits_of_the_reference(
    table: Table, step: ForwardContext, dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    heads, kv_heads, dim, turned = shape
    (q, k, v), cos_sin = fused(153, heads, kv_heads, dim, dtype), angles(turned)
    kv, expected = empty_cache(step, kv_heads, dim, dtype), empty_cache(step, kv_heads, dim, dtype)
    for given in (cos_sin, None):
        out = table["rotary_and_cache"](q, k, v, kv, step, HeadPrep(given))
        assert torch.equal(out, reference.rotary_and_cache(q, k, v, expected, step, HeadPrep(given)))
        assert torch.equal(kv, expected)
    assert torch.equal(table["rotate"](k, cos_sin), reference.rotate(k, cos_sin))


@pytest.mark.parametrize(
    ("dtype", "weights"), [(DTYPES[0], DTYPES[0]), (DTYPES[1], DTYPES[0]), (DTYPES[1],) * 2]
)
@pytest.mark.parametrize("normed_values", [False, True])
def test_norms_come_first(
    table: Table, step: ForwardContext, dtype: torch.dtype, weights: torch.dtype, normed_values: bool
) -> None:
    (q, k, v), cos_sin = fused(153, 4, 2, 72, dtype), angles(72)
    q_norm, k_norm, v_norm = torch.randn(3, 72).to(weights)
    prep = HeadPrep(cos_sin, q_norm, k_norm, EPS, v_norm if normed_values else None)
    kv, expected = empty_cache(step, 2, 72, dtype), empty_cache(step, 2, 72, dtype)
    out = table["rotary_and_cache"](q, k, v, kv, step, prep)
    turned = reference.rotary_and_cache(q, k, v, expected, step, prep)
    # A digit of the norm may be rounded in the other direction.
    tolerance: dict[str, Any] = (
        {"rtol": 2e-6, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-6}
    )
    torch.testing.assert_close(out, turned, **tolerance)
    torch.testing.assert_close(kv, expected, **tolerance)
    assert (out == turned).float().mean() > (0.4 if dtype == torch.float32 else 0.99)
    for angles_or_none in (cos_sin, None):
        alone = table["rotate"](q, angles_or_none, q_norm, EPS)
        torch.testing.assert_close(alone, reference.rotate(q, angles_or_none, q_norm, EPS), **tolerance)
    assert torch.equal(table["rotate"](q, cos_sin, q_norm, EPS), out)


def test_a_token_has_the_same_bits_in_any_batch(table: Table) -> None:
    q, k, v = fused(153, 4, 2, 64, torch.float32)
    cos_sin, norm = angles(64), torch.randn(64)
    whole = make_step([153], [153], block_size=16)
    kv = empty_cache(whole, 2, 64, torch.float32)
    together = table["rotary_and_cache"](q, k, v, kv, whole, HeadPrep(cos_sin, norm, norm, EPS))
    for token in (0, 77, 152):
        one = slice(token, token + 1)
        step = make_step([1], [1], block_size=16)
        prep = HeadPrep(cos_sin[one], norm, norm, EPS)
        alone = table["rotary_and_cache"](q[one], k[one], v[one], kv, step, prep)
        assert torch.equal(alone, together[one])


@pytest.mark.parametrize("dim", [12, 520])
def test_the_reference_computes_what_the_kernels_cannot(table: Table, step: ForwardContext, dim: int) -> None:
    (q, k, v), cos_sin = fused(153, 2, 1, dim, torch.float32), angles(4)
    kv, expected = (empty_cache(step, 1, dim, torch.float32) for _ in range(2))
    out = table["rotary_and_cache"](q, k, v, kv, step, HeadPrep(cos_sin))
    assert torch.equal(out, reference.rotary_and_cache(q, k, v, expected, step, HeadPrep(cos_sin)))
    assert torch.equal(kv, expected)
    assert torch.equal(table["rotate"](q, cos_sin), reference.rotate(q, cos_sin))
