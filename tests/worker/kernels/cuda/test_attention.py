"""Attention by Triton against its definition in float64, with NaN in everything that must not be read."""

from dataclasses import replace

import exact
import pytest
import torch
from interpreted import DEVICE, assert_near, on_device
from paged import make_cache, make_step
from torch import Tensor

from models.context import ForwardContext
from models.ops import reference
from models.ops.attention_inputs import CacheScales
from worker.kernels.cuda import attention
from worker.kernels.cuda.capabilities import Card

OPERATIONS = attention.operations(Card(90, 132))
DTYPES = [torch.float32, torch.bfloat16]
FEW_PROCESSORS = attention.operations(Card(80, 1))
"""A card on which no keys are split."""


def queries(step: ForwardContext, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Queries beside other columns of the projection that they come from, and before other rows."""
    wide = torch.full((len(step.positions) + 3, heads + 2, dim), torch.nan, dtype=dtype)
    wide[:-3, :heads] = torch.randn(len(wide) - 3, heads, dim)
    return wide.to(DEVICE)[:-3, :heads]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("new", "total", "group", "kv_heads", "dim", "block_size"),
    [
        ([1, 1, 1], [37, 5, 130], 4, 2, 64, 16),
        ([1], [700], 2, 1, 40, 64),  # its keys are split
        ([1, 7, 40, 1], [33, 7, 64, 100], 4, 1, 32, 16),  # prompts beside decoding rows
        ([2, 9], [20, 60], 7, 2, 80, 12),  # nothing is a power of two
        ([70], [200], 1, 1, 96, 64),  # a tile of keys lies in one block
        ([1, 3], [9, 20], 20, 1, 16, 16),  # one token's heads take more than the least tile
        ([5, 1], [5, 300], 2, 1, 256, 16),
        ([5, 1], [5, 300], 8, 1, 512, 16),
        ([1, 6], [50, 31], 7, 1, 128, 20),
        ([3, 1, 1], [3, 1, 44], 3, 3, 48, 7),
    ],
)
def test_attention_is_that_of_its_definition(
    dtype: torch.dtype,
    new: list[int],
    total: list[int],
    group: int,
    kv_heads: int,
    dim: int,
    block_size: int,
) -> None:
    step = on_device(make_step(new, total, block_size))
    kv = make_cache(step, kv_heads, dim, dtype).to(DEVICE)
    q = queries(step, group * kv_heads, dim, dtype)
    out = OPERATIONS["attention"](q, kv, step, scale=0.2)
    assert_near(out, exact.attention(q, kv, step, scale=0.2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limits", [{"window": 24}, {"window": 1}, {"softcap": 5.0}])
def test_windows_and_caps(dtype: torch.dtype, limits: dict[str, float]) -> None:
    step = on_device(make_step([1, 20, 1], [90, 64, 600], 16))
    kv = make_cache(step, 2, 32, dtype).to(DEVICE)
    q = queries(step, 4, 32, dtype)
    out = OPERATIONS["attention"](q, kv, step, scale=0.2, **limits)
    assert_near(out, exact.attention(q, kv, step, scale=0.2, **limits))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_take_their_share_once(dtype: torch.dtype) -> None:
    step = on_device(make_step([1, 20, 1], [90, 64, 600], 16))
    kv = make_cache(step, 2, 32, dtype).to(DEVICE)
    q, sinks = queries(step, 4, 32, dtype), torch.randn(4).to(dtype).to(DEVICE) + 2
    out = OPERATIONS["attention"](q, kv, step, scale=0.2, window=300, sinks=sinks)
    assert_near(out, exact.attention(q, kv, step, scale=0.2, window=300, sinks=sinks))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_fall_with_distance(dtype: torch.dtype) -> None:
    step = on_device(make_step([1, 20, 1], [90, 64, 600], 16))
    kv = make_cache(step, 2, 32, dtype).to(DEVICE)
    q, slopes = queries(step, 4, 32, dtype), torch.tensor([0.5, 0.25, 0.004, 0.0]).to(DEVICE)
    bias = torch.randn(4, 81).to(DEVICE)  # of keys up to 40 before or behind a query, or farther away
    for limits in ({"slopes": slopes}, {"bias": bias}):
        out = OPERATIONS["attention"](q, kv, step, scale=0.2, window=300, **limits)
        assert_near(out, exact.attention(q, kv, step, scale=0.2, window=300, **limits))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limits", [{}, {"window": 24}, {"softcap": 5.0, "sinks": True}, {"slopes": True}])
def test_tokens_of_pictures_see_all_of_their_picture(
    dtype: torch.dtype, limits: dict[str, float | bool]
) -> None:
    """A picture that fills a block and more, one that ends a row whose keys are split, and rows without."""
    step = on_device(make_step([1, 150, 4, 40, 1], [90, 240, 600, 40, 9], 16))
    last = step.positions.int()
    for first, stop in ((3, 120), (120, 124), (152, 155), (170, 195)):
        last[first:stop] = last[stop - 1].clone()
    kv = make_cache(step, 2, 32, dtype).to(DEVICE)
    q = queries(step, 4, 32, dtype)
    given = {name: torch.rand(4).to(DEVICE) if value is True else value for name, value in limits.items()}
    out = OPERATIONS["attention"](q, kv, step, scale=0.2, last=last, **given)
    assert_near(out, exact.attention(q, kv, step, scale=0.2, last=last, **given))  # pyright: ignore[reportArgumentType]


def test_splits_change_nothing_but_digits() -> None:
    step = on_device(make_step([1, 2], [900, 600], 64))
    other = replace(step)
    kv = make_cache(step, 1, 32, torch.float32).to(DEVICE)
    q = queries(step, 2, 32, torch.float32)
    split = OPERATIONS["attention"](q, kv, step, scale=0.2)
    whole = FEW_PROCESSORS["attention"](q, kv, other, scale=0.2)
    assert [launch.split for launches in (step.plan or {}).values() for launch in launches] == [7]
    assert [launch.split for launches in (other.plan or {}).values() for launch in launches] == [0]
    assert_near(split, whole)


def test_blocks_of_no_row_write_nothing() -> None:
    """A graph has room for more rows than a step may bring."""
    step = on_device(make_step([1, 1], [600, 600], 64))
    kv = make_cache(step, 1, 32, torch.float32).to(DEVICE)
    q = queries(step, 2, 32, torch.float32)
    expected = OPERATIONS["attention"](q, kv, step, scale=0.2)
    assert step.plan is not None
    for launches in step.plan.values():
        launches[0].rows[launches[0].rows == 1] = -1
    # Memory that nobody writes is not defined, so the row that is left is all that can be compared.
    assert_near(OPERATIONS["attention"](q, kv, step, scale=0.2)[:1], expected[:1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "group", "kv_heads", "dim", "window", "reach"),
    [
        ([9, 33, 1, 70], 4, 2, 32, None, None),
        ([9, 33, 1, 70], 1, 4, 40, 8, None),
        ([70, 5], 1, 3, 24, None, 6),
        ([70, 5], 2, 1, 64, 20, 30),
        ([33, 2, 17], 7, 1, 96, 5, 3),
    ],
)
def test_encoders_see_both_sides(
    dtype: torch.dtype,
    lengths: list[int],
    group: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    reach: int | None,
) -> None:
    step = on_device(make_step(lengths, lengths, 16))
    heads = group * kv_heads
    wide = torch.full((sum(lengths) + 3, heads + 2 * kv_heads + 1, dim), torch.nan, dtype=dtype)
    wide[:-3, :-1] = torch.randn(sum(lengths), heads + 2 * kv_heads, dim)
    q, k, v, _ = wide.to(DEVICE)[:-3].split([heads, kv_heads, kv_heads, 1], dim=1)
    bias = None if reach is None else torch.randn(heads, 2 * reach + 1).to(DEVICE)
    for causal in (False, True):
        limits = {"window": window, "bias": bias, "causal": causal}
        out = OPERATIONS["encoder_attention"](q, k, v, step, scale=0.2, **limits)
        assert_near(out, exact.encoder_attention(q, k, v, step, scale=0.2, **limits))


def test_what_the_kernels_do_not_know_is_left_to_the_reference() -> None:
    step = on_device(make_step([3], [5], 4))
    kv = make_cache(step, 1, 640, torch.float32).to(DEVICE)
    q = queries(step, 1, 640, torch.float32)
    out = OPERATIONS["attention"](q, kv, step, scale=0.2)
    assert_near(out, reference.attention(q, kv, step, scale=0.2))
    assert step.plan is None


@pytest.mark.parametrize("cached", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_of_8_bits_is_widened(cached: torch.dtype, dtype: torch.dtype) -> None:
    step = on_device(make_step([1, 7, 1], [37, 20, 700], 16))
    kv = make_cache(step, 2, 40, cached).to(DEVICE)
    q = queries(step, 6, 40, dtype)
    out = OPERATIONS["attention"](q, kv, step, scale=0.2)
    assert_near(out, exact.attention(q, kv.to(dtype), step, scale=0.2))
    assert_near(reference.attention(q, kv, step, scale=0.2), out)


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_scales_of_a_cache_are_multiplied(softcap: float | None) -> None:
    """Scales of keys are part of the scores' scale, and those of values of the results; splits are joined."""
    step = on_device(make_step([1, 7, 1], [37, 20, 700], 16))
    kv = make_cache(step, 2, 40, torch.float8_e4m3fn).to(DEVICE)
    q, scales = queries(step, 6, 40, torch.float32), CacheScales(0.3, 1.7)
    meant = kv.float() * torch.tensor([scales.keys, scales.values]).view(2, 1, 1, 1, 1).to(DEVICE)
    expected = exact.attention(q, meant, step, scale=0.2, softcap=softcap)
    options = {"scale": 0.2, "softcap": softcap, "scales": scales}
    assert_near(OPERATIONS["attention"](q, kv, step, **options), expected)
    assert_near(reference.attention(q, kv, step, **options), expected)
    assert_near(OPERATIONS["attention"](q, meant, step, **options), expected)  # only 8 bits are scaled
