"""Norms, rotations and activations by Triton, against their definitions in float64, and the check at start.

What lies beside the columns of an input, and behind its rows, is NaN.
"""

import exact
import pytest
import torch
from interpreted import DEVICE, assert_near, on_device
from paged import make_cache, make_step
from torch import Tensor

from models.ops import reference
from models.ops.attention_inputs import AS_PROJECTED, UNSCALED, CacheScales, HeadPrep
from worker.kernels.compare_with_reference import wrong
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.operations import cuda_operations

OPERATIONS = cuda_operations(Card(90, 132))
DTYPES = [torch.float32, torch.bfloat16]


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


def beside_nan(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Random rows in wider ones, before others."""
    wide = torch.full((rows + 2, width + 3), torch.nan, dtype=dtype)
    wide[:rows, :width] = torch.randn(rows, width)
    return wide.to(DEVICE)[:rows, :width]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_type", DTYPES)
@pytest.mark.parametrize("width", [16, 67, 1100])
def test_norms(dtype: torch.dtype, weight_type: torch.dtype, width: int) -> None:
    x, residual = beside_nan(5, width, dtype), beside_nan(5, width, dtype)
    weight, bias = values(width, dtype=weight_type), values(width, dtype=dtype)
    total = x + residual
    assert_near(OPERATIONS["rms_norm"](x, weight, 1e-5), exact.rms_norm(x, weight, 1e-5))
    out, added = OPERATIONS["add_rms_norm"](x, residual, weight, 1e-5)
    assert_near(out, exact.rms_norm(total, weight, 1e-5))
    assert_near(added, total)
    for given in (bias, None):
        out = OPERATIONS["layer_norm"](x, weight, given, 1e-5)
        assert_near(out, exact.layer_norm(x, weight, given, 1e-5))
        out, added = OPERATIONS["add_layer_norm"](x, residual, weight, given, 1e-5)
        assert_near(out, exact.layer_norm(total, weight, given, 1e-5))
        assert_near(added, total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("front", "behind"), [(48, 10), (512, 64), (7, 0)])
def test_the_front_of_rows_is_normalised(dtype: torch.dtype, front: int, behind: int) -> None:
    x, weight = beside_nan(5, front + behind, dtype), values(front, dtype=dtype)
    out = OPERATIONS["front_rms_norm"](x, weight, 1e-5)
    assert_near(out[:, :front], exact.rms_norm(x[:, :front], weight, 1e-5))
    assert torch.equal(out[:, front:], x[:, front:])


def test_the_sum_is_rounded_before_it_is_normalised() -> None:
    """The next layer adds to the rounded sum, so the norm must be that of the same numbers."""
    x, residual = values(4, 64, dtype=torch.bfloat16), 100 * values(4, 64, dtype=torch.bfloat16)
    weight = torch.ones(64, device=DEVICE)
    normed, total = OPERATIONS["add_rms_norm"](x, residual, weight, 1e-5)
    again = OPERATIONS["rms_norm"](total, weight, 1e-5)
    assert torch.equal(normed, again)


def prepared(x: Tensor, weight: Tensor | None, prep: HeadPrep) -> Tensor:
    """Heads [T, H, D] in float64 as attention takes them."""
    x = x.double() if weight is None else exact.rms_norm(x, weight, prep.eps)
    return x if prep.cos_sin is None else exact.rotate(x, prep.cos_sin)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dim", "rotated", "group"),
    [(64, 64, 2), (40, 24, 7), (96, 96, 1), (32, 0, 2), (80, 20, 3), (256, 256, 1)],
)
@pytest.mark.parametrize("normed", [True, False])
def test_heads_are_prepared_and_cached(
    dtype: torch.dtype, dim: int, rotated: int, group: int, normed: bool
) -> None:
    """All but the keys and values of the step stays as it was: NaN, or what other tokens have cached."""
    step = on_device(make_step([1, 5], [9, 5], 4))
    heads = 2 * group + 4
    wide = torch.full((8, heads + 1, dim), torch.nan, dtype=dtype)
    wide[:6, :heads] = torch.randn(6, heads, dim)
    q, k, v, _ = wide.to(DEVICE)[:6].split([2 * group, 2, 2, 1], dim=1)
    prep = HeadPrep(
        cos_sin=values(6, rotated) if rotated else None,
        q_norm=values(dim, dtype=dtype) if normed else None,
        k_norm=values(dim, dtype=dtype) if normed else None,
        eps=1e-6,
        v_norm=values(dim, dtype=dtype) if normed and group > 1 else None,
    )
    cache = make_cache(step, 2, dim, dtype).to(DEVICE)
    expected = cache.double()
    block, place = step.slot_mapping // step.block_size, step.slot_mapping % step.block_size
    expected[0, block, :, place] = prepared(k, prep.k_norm, prep)
    expected[1, block, :, place] = prepared(v, prep.v_norm, HeadPrep(eps=prep.eps))
    assert_near(OPERATIONS["rotary_and_cache"](q, k, v, cache, step, prep), prepared(q, prep.q_norm, prep))
    assert torch.equal(cache.isnan(), expected.isnan())
    assert_near(cache.nan_to_num(77.0), expected.nan_to_num(77.0))
    if prep.cos_sin is not None:
        assert_near(OPERATIONS["rotate"](q, prep.cos_sin), exact.rotate(q, prep.cos_sin))
    assert_near(OPERATIONS["rotate"](q, prep.cos_sin, prep.q_norm, prep.eps), prepared(q, prep.q_norm, prep))


@pytest.mark.filterwarnings("ignore:overflow")  # numpy warns of infinity, by which a gate is closed
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared"])
def test_activations(dtype: torch.dtype, kind: str) -> None:
    rows = [3 * values(3, 1290, dtype=dtype), values(1, 1290, dtype=dtype) * 40]
    x = torch.cat([*rows, torch.full_like(rows[1], torch.nan)])[:4]
    assert_near(OPERATIONS["activation"](x, kind), exact.activation(x, kind))
    gate, up = x.chunk(2, dim=1)
    assert_near(OPERATIONS["gated"](x, kind), exact.activation(gate, kind) * up)


def test_an_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no activation 'swish'"):
        OPERATIONS["activation"](values(2, 4), "swish")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows for other ranks' experts are never written
def test_the_check_at_start_finds_what_is_wrong() -> None:
    assert wrong(OPERATIONS, target=DEVICE) == []
    off = {**OPERATIONS, "rms_norm": lambda x, weight, eps: reference.rms_norm(x, weight, eps) * 1.5}
    assert wrong(off, target=DEVICE) == ["rms_norm"]


@pytest.mark.parametrize("scales", [UNSCALED, CacheScales(0.25, 8.0)], ids=["plain", "scaled"])
@pytest.mark.parametrize(("cached", "most"), [(torch.float8_e4m3fn, 448), (torch.float8_e5m2, 57344)])
def test_a_cache_of_8_bits_is_written(cached: torch.dtype, most: int, scales: CacheScales) -> None:
    """Scales are powers of two, so that a quotient is the same however it is divided."""
    step = on_device(make_step([1, 5], [9, 5], 4))
    q, k, v = (values(6, heads, 40).to(torch.bfloat16) for heads in (4, 2, 2))
    k[0, 0, 0], v[0, 0, 0] = 1e6, -1e6
    mine = make_cache(step, 2, 40, cached).to(DEVICE)
    other, plain = mine.clone(), mine.clone()
    OPERATIONS["rotary_and_cache"](q, k, v, mine, step, AS_PROJECTED, scales)
    reference.rotary_and_cache(q, k, v, other, step, AS_PROJECTED, scales)
    reference.rotary_and_cache(q, k / scales.keys, v / scales.values, plain, step)
    assert torch.equal(plain.view(torch.uint8), other.view(torch.uint8))
    found, expected = (kv.float().nan_to_num(77.0).cpu() for kv in (mine, other))
    assert torch.equal(found, expected)
    assert (found.max(), found.min()) == (most, -most)
