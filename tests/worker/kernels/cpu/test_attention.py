"""Attention over the paged cache by the C kernels, for every level that this machine can run."""

from typing import Any

import exact
import pytest
import torch
from by_pairs import by_pairs
from paged import STEPS, assert_near, make_cache, make_step
from torch import Tensor

from models.context import ForwardContext
from models.ops import reference
from worker.kernels.cpu.operations import Table

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [
    (1, 1, 8),
    (2, 1, 16),
    (3, 3, 64),
    (2, 2, 128),
    (8, 1, 40),
    (4, 2, 80),
    (1, 2, 256),
    (5, 1, 96),
    (4, 1, 512),
]
"""Query heads for each key head, key heads, dimensions."""


pytestmark = [pytest.mark.usefixtures("threads")]


def queries(step: ForwardContext, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(len(step.positions), heads, dim).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("new", "total"), STEPS)
def test_equals_the_reference(table: Table, dtype: torch.dtype, new: list[int], total: list[int]) -> None:
    """The cache has NaN past the end of each sequence, which must not be read."""
    for number, (group, kv_heads, dim) in enumerate(SHAPES):
        step = make_step(new, total, block_size=(32, 16, 4)[number % 3])
        kv = make_cache(step, kv_heads, dim, dtype)
        q = queries(step, group * kv_heads, dim, dtype)
        exact = reference.attention(q.double(), kv.double(), step, scale=dim**-0.5)
        assert_near(table["attention"](q, kv, step, scale=dim**-0.5), exact)


@by_pairs(dtype=DTYPES, softcap=[None, 0.7, 50.0], window=[None, 1, 63, 64, 200, 10_000])
def test_windows_and_capped_scores(
    table: Table, dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    step = make_step([1, 150, 1, 3], [20, 290, 400, 130], block_size=16)
    kv, q = make_cache(step, 2, 64, dtype), queries(step, 6, 64, dtype)
    limits: dict[str, Any] = {"scale": 0.3, "window": window, "softcap": softcap}
    exact = reference.attention(q.float(), kv.float(), step, **limits)
    assert_near(table["attention"](q, kv, step, **limits), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("new", "total"), [*STEPS, ([3, 1, 40], [3, 1, 41])])
def test_place_0_may_be_seen_by_none_but_itself(
    table: Table, dtype: torch.dtype, new: list[int], total: list[int]
) -> None:
    step = make_step(new, total, block_size=4)
    step.first = 1
    kv, q = make_cache(step, 2, 64, dtype), queries(step, 6, 64, dtype)
    out = table["attention"](q, kv, step, scale=0.3)
    assert_near(out, reference.attention(q.double(), kv.double(), step, scale=0.3))
    kv[0, step.block_table[:, 0].long(), :, 0] = 1000.0
    behind = step.positions > 0
    assert torch.equal(table["attention"](q, kv, step, scale=0.3)[behind], out[behind])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("new", "total"), STEPS)
def test_sinks_take_their_share(table: Table, dtype: torch.dtype, new: list[int], total: list[int]) -> None:
    """Some sinks outweigh all keys, and some weigh nothing; the heads of a key head have different ones."""
    step = make_step(new, total, block_size=16)
    kv, q = make_cache(step, 2, 64, dtype), queries(step, 8, 64, dtype)
    sinks = torch.tensor([-300.0, -3.0, 0.0, 0.5, 2.0, 5.0, 90.0, 300.0])
    for window in (None, 50):
        limits: dict[str, Any] = {"scale": 0.3, "window": window, "sinks": sinks}
        exact = reference.attention(q.double(), kv.double(), step, **limits)
        assert_near(table["attention"](q, kv, step, **limits), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("new", "total"), STEPS)
def test_scores_fall_with_distance(
    table: Table, dtype: torch.dtype, new: list[int], total: list[int]
) -> None:
    """Alibi, with heads of a key head that have slopes of their own; heads of 24 are no whole vectors."""
    slopes = torch.tensor([0.5, 0.25, 0.07, 0.03, 1.0, 0.0, 0.001, 0.3])
    for dim, window in ((64, None), (24, None), (64, 50)):
        step = make_step(new, total, block_size=16)
        kv, q = make_cache(step, 2, dim, dtype), queries(step, 8, dim, dtype)
        limits: dict[str, Any] = {"scale": 0.3, "window": window, "slopes": slopes}
        exact_out = exact.attention(q, kv, step, **limits)
        assert_near(reference.attention(q.float(), kv.float(), step, **limits), exact_out)
        assert_near(table["attention"](q, kv, step, **limits), exact_out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("new", "total"), STEPS)
def test_a_bias_is_added_by_distance(
    table: Table, dtype: torch.dtype, new: list[int], total: list[int]
) -> None:
    """Each head has its own; those that share a key head, and heads of 24, are computed otherwise."""
    for dim, heads, reach in ((64, 4, 130), (24, 4, 20), (64, 8, 3)):
        step = make_step(new, total, block_size=16)
        kv, q = make_cache(step, 4, dim, dtype), queries(step, heads, dim, dtype)
        limits: dict[str, Any] = {"scale": 0.3, "bias": 3 * torch.randn(heads, 2 * reach + 1)}
        exact_out = exact.attention(q, kv, step, **limits)
        assert_near(reference.attention(q.float(), kv.float(), step, **limits), exact_out)
        assert_near(table["attention"](q, kv, step, **limits), exact_out)


def test_unseen_keys_stay_unseen_at_a_large_scale(table: Table) -> None:
    step = make_step([70], [70], block_size=16)
    q, kv = queries(step, 4, 64, torch.bfloat16) / 8, make_cache(step, 2, 64, torch.bfloat16)
    out = table["attention"](q, kv, step, scale=1.0)
    assert_near(out, reference.attention(q.double(), kv.double(), step, scale=1.0))


@pytest.mark.parametrize("what", ["sinks", "slopes", "bias"])
def test_numbers_of_other_heads_are_refused(table: Table, what: str) -> None:
    step = make_step([1], [9], block_size=16)
    kv, q = make_cache(step, 1, 32, torch.float32), queries(step, 2, 32, torch.float32)
    with pytest.raises(ValueError, match=what):
        table["attention"](q, kv, step, scale=0.1, **{what: torch.zeros(3)})


def test_a_nan_stays_in_its_sequence(table: Table) -> None:
    step = make_step([1, 30, 5], [9, 30, 40], block_size=16)
    kv, q = make_cache(step, 1, 32, torch.float32), queries(step, 2, 32, torch.float32)
    kv[:, int(step.block_table[1, 0]), :, 3] = torch.nan
    out = table["attention"](q, kv, step, scale=0.1)
    assert out[4:31].isnan().all()
    assert out[[0, *range(31, 36)]].isfinite().all()


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float16, 64), (torch.float32, 12)])
def test_the_reference_computes_what_the_kernels_cannot(table: Table, dtype: torch.dtype, dim: int) -> None:
    step = make_step([1, 30], [9, 30], block_size=16)
    kv, q = make_cache(step, 1, dim, dtype), queries(step, 2, dim, dtype)
    assert torch.equal(
        table["attention"](q, kv, step, scale=0.1), reference.attention(q, kv, step, scale=0.1)
    )


def test_queries_and_cache_need_not_be_contiguous(table: Table) -> None:
    step = make_step([1, 30], [9, 30], block_size=16)
    kv, q = make_cache(step, 1, 32, torch.float32), queries(step, 2, 32, torch.float32)
    expected = table["attention"](q, kv, step, scale=0.1)
    spread_q = q.repeat(1, 2, 1)[:, :2]
    assert torch.equal(table["attention"](spread_q, kv, step, scale=0.1), expected)
    spread_kv = kv.transpose(2, 3).contiguous().transpose(2, 3)
    assert_near(table["attention"](q, spread_kv, step, scale=0.1), expected)
