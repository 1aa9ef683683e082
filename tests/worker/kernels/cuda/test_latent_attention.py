"""Latent attention by Triton against the reference in float64, with NaN in all that must not be read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpreted import DEVICE, assert_near, on_device
from latent_sizes import Sizes
from paged import make_step
from torch import Tensor

from models.context import ForwardContext
from models.ops import latent_ops
from worker.kernels.cuda import attention_plan
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.latent_attention import operations

ATTEND = operations(Card(90, 132))["latent_attention"]
ON_FEW_PROCESSORS = operations(Card(80, 1))["latent_attention"]
"""The operation for a card on which no rows are split."""
DTYPES = [torch.float32, torch.bfloat16]


ODD = Sizes(5, 48, 10, 7, 72)
SPLIT = Sizes(3, 32, 8, 24, 40)


class Layer:
    """A layer with random matrices, and what a step brings; the cache has the tokens before, and NaN."""

    def __init__(self, sizes: Sizes, step: ForwardContext, dtype: torch.dtype) -> None:
        tokens, row, width = len(step.positions), sizes.rank + sizes.rope, sizes.nope + sizes.rope
        matrix = torch.randn(sizes.heads * (sizes.nope + sizes.value), sizes.rank) / sizes.rank**0.5
        up = latent_ops.pack_latent(matrix, sizes.heads, sizes.nope, sizes.rank)
        self.up = up.to(dtype).to(DEVICE)
        queries = torch.full((tokens + 1, sizes.heads + 2, width), torch.nan, dtype=dtype)
        queries[:tokens, : sizes.heads] = torch.randn(tokens, sizes.heads, width)
        self.q = queries.to(DEVICE)[:tokens, : sizes.heads]
        latents = torch.full((tokens + 1, row + 3), torch.nan, dtype=dtype)
        latents[:tokens, :row] = torch.randn(tokens, row)
        self.latent = latents.to(DEVICE)[:tokens, :row]
        angles = 7 * torch.rand(tokens, sizes.rope // 2)
        self.cos_sin: Tensor | None = torch.cat([angles.cos(), angles.sin()], dim=1).to(DEVICE)
        size = step.block_size
        cache = torch.full((step.block_table.numel(), size, row), torch.nan).to(dtype)
        for table, new, total in zip(
            step.block_table.long(), step.query_lens_host, step.kv_lens_host, strict=True
        ):
            held = torch.arange(total - new)
            cache[table[held // size], held % size] = torch.randn(total - new, row).to(dtype)
        self.cache = cache.to(DEVICE)
        self.step = on_device(step)

    def computed(self, attend: object = ATTEND) -> tuple[Tensor, Tensor]:
        """What tokens become, and the cache."""
        assert callable(attend)
        cache = self.cache.clone()
        given = self.q, self.latent, self.up, cache, self.step, self.cos_sin
        return attend(*given, scale=0.2), cache

    def exact(self) -> tuple[Tensor, Tensor]:
        """The same by the reference in float64."""
        q, latent, up, cache = (x.double() for x in (self.q, self.latent, self.up, self.cache))
        out = latent_ops.latent_attention(q, latent, up, cache, self.step, self.cos_sin, scale=0.2)
        return out, cache

    def assert_right(self) -> None:
        out, cache = self.computed()
        assert self.step.plan is not None, "the kernel has computed"
        expected, expected_cache = self.exact()
        assert_near(out, expected)
        assert_near(torch.nan_to_num(cache, 9.0), torch.nan_to_num(expected_cache, 9.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("new", "total", "sizes", "block_size"),
    [
        ([1, 1, 1], [37, 5, 1], ODD, 16),
        ([1, 7, 21, 1], [33, 7, 40, 70], ODD, 12),  # prompts beside decoding rows
        ([1, 2], [600, 20], SPLIT, 64),
        ([30], [50], SPLIT, 64),  # a tile of rows lies in one block
        ([1, 3], [9, 20], Sizes(37, 16, 2, 8, 8), 5),  # more heads than 16
        ([1, 3], [9, 20], Sizes(67, 16, 2, 8, 8), 5),  # heads in parts, the last of which has fewer
        ([40, 1, 23, 18], [40, 33, 60, 18], ODD, 16),  # keys and values are made for the first prompt
        ([33, 35], [33, 35], Sizes(2, 32, 8, 16, 80), 64),  # and here for both
        ([2], [40], Sizes(1, 512, 64, 16, 24), 32),
    ],
)
def test_it_is_the_references(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    new: list[int],
    total: list[int],
    sizes: Sizes,
    block_size: int,
) -> None:
    monkeypatch.setattr(attention_plan, "LEAST_MADE", 20)
    Layer(sizes, make_step(new, total, block_size), dtype).assert_right()


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_rotation(dtype: torch.dtype) -> None:
    layer = Layer(ODD, make_step([3, 1], [3, 40], 16), dtype)
    layer.cos_sin = None
    layer.assert_right()


def test_splits_change_nothing_but_digits() -> None:
    layer = Layer(SPLIT, make_step([1, 2], [600, 530], 64), torch.float32)
    split, _ = layer.computed()
    assert [launch.split for launches in (layer.step.plan or {}).values() for launch in launches] == [19]
    layer.step = replace(layer.step, plan=None)
    whole, _ = layer.computed(ON_FEW_PROCESSORS)
    assert [launch.split for launches in (layer.step.plan or {}).values() for launch in launches] == [0]
    assert_near(split, whole)


def test_blocks_of_no_row_write_nothing() -> None:
    """A graph has room for more rows than a step may bring."""
    layer = Layer(SPLIT, make_step([1, 1], [600, 20], 64), torch.float32)
    expected, _ = layer.computed()
    assert layer.step.plan is not None
    for launches in layer.step.plan.values():
        launches[0].rows[launches[0].rows == 1] = -1
    # Memory that nobody writes is not defined, so the row that is left is all that can be compared.
    assert_near(layer.computed()[0][:1], expected[:1])


@pytest.mark.parametrize(("rank", "rope"), [(528, 4), (16, 130)])
def test_what_the_kernels_do_not_know_is_left_to_the_reference(rank: int, rope: int) -> None:
    layer = Layer(Sizes(2, rank, rope, 8, 8), make_step([3], [5], 4), torch.float32)
    assert_near(layer.computed()[0], layer.computed(latent_ops.latent_attention)[0])
    assert layer.step.plan is None
