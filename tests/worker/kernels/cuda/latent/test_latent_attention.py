"""Latent attention by Triton against the reference in float64, with NaN in all that must not be read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreted import DEVICE, assert_near, on_device
from latent_sizes import Sizes
from paged import make_step
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.context import ForwardContext
from models.ops import latent_ops
from worker.kernels.cuda.attention import Launch, plan_step
from worker.kernels.cuda.card import Card
from worker.kernels.cuda.latent import plan as latent_plan
from worker.kernels.cuda.latent.attention import bind
from worker.kernels.cuda.latent.plan import FEW_QUERIES, plan_latents
from worker.kernels.cuda.plan import Heads, Prompt
from worker.kernels.cuda.steps.mixed import SIZES
from worker.kernels.cuda.tiles import latent_tiles

ATTEND = bind(Card(90, 132))["latent_attention"]
ON_FEW_PROCESSORS = bind(Card(80, 1))["latent_attention"]
"""The operation for a card on which no rows are split."""
DTYPES = [torch.float32, torch.bfloat16]


ODD = Sizes(5, 48, 10, 7, 72)
SPLIT = Sizes(3, 32, 8, 24, 40)


@pytest.fixture(autouse=True)
def _seed() -> None:  # pyright: ignore[reportUnusedFunction]
    torch.manual_seed(0)


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
        ([1, 3], [9, 20], Sizes(37, 16, 2, 8, 8), 5),  # heads in parts, the last of which has fewer
        ([2], [40], Sizes(1, 512, 64, 16, 24), 32),
    ],
)
def test_it_is_the_references(
    dtype: torch.dtype, new: list[int], total: list[int], sizes: Sizes, block_size: int
) -> None:
    Layer(sizes, make_step(new, total, block_size), dtype).assert_right()


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_rotation(dtype: torch.dtype) -> None:
    layer = Layer(ODD, make_step([3, 1], [3, 40], 16), dtype)
    layer.cos_sin = None
    layer.assert_right()


def test_splits_change_nothing_but_digits() -> None:
    layer = Layer(SPLIT, make_step([1, 2], [600, 530], 64), torch.float32)
    split, _ = layer.computed()
    assert [launch.splits for launches in (layer.step.plan or {}).values() for launch in launches] == [2]
    layer.step = replace(layer.step, plan=None)
    whole, _ = layer.computed(ON_FEW_PROCESSORS)
    assert [launch.splits for launches in (layer.step.plan or {}).values() for launch in launches] == [1]
    assert_near(split, whole)


def test_blocks_of_no_row_write_nothing() -> None:
    """A graph has room for more rows than a step may bring."""
    layer = Layer(SPLIT, make_step([1, 1], [600, 20], 64), torch.float32)
    expected, _ = layer.computed()
    assert layer.step.plan is not None
    for launches in layer.step.plan.values():
        launches[0].rows[1] = -1
    # Memory that nobody writes is not defined, so the row that is left is all that can be compared.
    assert_near(layer.computed()[0][:1], expected[:1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("new", "total", "sizes", "block_size", "made"),
    [
        ([150], [230], Sizes(2, 32, 8, 16, 16), 64, [0]),
        ([1, 21, 3, 70], [40, 33, 3, 70], Sizes(3, 48, 10, 7, 24), 12, [1, 3]),
        ([20], [30], Sizes(1, 16, 4, 8, 8), 16, []),
    ],
)
def test_long_prompts_have_keys_and_values_of_their_own(
    dtype: torch.dtype,
    new: list[int],
    total: list[int],
    sizes: Sizes,
    block_size: int,
    made: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(latent_plan, "FEW_QUERIES", 20)
    layer = Layer(sizes, make_step(new, total, block_size), dtype)
    layer.assert_right()
    (planned,) = (layer.step.plan or {}).values()
    assert [blocks.prompt.row for blocks in planned if blocks.prompt is not None] == made
    assert len(planned) - len(made) == (len(made) != 1), "other rows are compared with latents"


class Taken(TorchDispatchMode):
    """Notes the bytes of memory that is taken in the type of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.new_empty.default:
            self.sizes.append(out.nbytes)
        return out


def test_keys_of_any_long_prompt_take_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take what the longest row would take, which is what is kept free for them."""
    monkeypatch.setattr(latent_plan, "FEW_QUERIES", 20)
    sizes, longest, block = Sizes(2, 32, 8, 16, 24), 300, 16
    monkeypatch.setattr(latent_plan, "MOST_MADE", 250 * sizes.heads)
    taken: list[list[int]] = []
    for total in (30, 100, 250):
        layer = Layer(sizes, make_step([25], [total], block), torch.float32)
        layer.computed()
        assert layer.step.plan is not None
        (key,) = layer.step.plan
        planned = plan_step(Card(90, 132), key, [25], [total], longest)
        layer.step.plan[key] = [
            Launch.of(blocks, tiles, lambda numbers: torch.from_numpy(numbers).to(DEVICE))
            for blocks, tiles in planned
        ]
        with Taken() as noted:
            layer.computed()
        layer.assert_right()
        taken.append([size for size in noted.sizes if size])
    rows = -(-250 // block) * block
    latents, made = sizes.rank + sizes.rope, sizes.heads * (sizes.nope + sizes.value)
    assert taken == [[4 * rows * latents, 4 * rows * made]] * 3


def test_steps_that_are_graphs_make_no_keys() -> None:
    assert max(SIZES) <= FEW_QUERIES


def test_a_short_prompt_and_one_whose_keys_would_fill_the_memory_are_compared_with_latents() -> None:
    heads, tiles = Heads(16, 1, 576, latent=True), latent_tiles(torch.bfloat16, short=False)
    most = 65_536
    for new, total, made in ((513, most, Prompt(0, most, most)), (513, most + 1, None), (512, 600, None)):
        ((blocks, chosen),) = plan_latents([new], [total], heads, torch.bfloat16, 90, 132, 99_999)
        assert blocks.prompt == made
        assert (chosen == tiles) is (made is None)


@pytest.mark.parametrize(("rank", "rope"), [(528, 4), (16, 130)])
def test_what_the_kernels_do_not_know_is_left_to_the_reference(rank: int, rope: int) -> None:
    layer = Layer(Sizes(2, rank, rope, 8, 8), make_step([3], [5], 4), torch.float32)
    assert_near(layer.computed()[0], layer.computed(latent_ops.latent_attention)[0])
    assert layer.step.plan is None
