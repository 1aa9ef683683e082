"""Latent attention by the C kernels, for every level that this machine can run; also in replayed steps."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from equal_bits import assert_same_bits
from kernel_levels import table_of, use_threads
from latent_sizes import Sizes
from paged import STEPS, make_step, rows_of
from torch import Tensor

from models.context import ForwardContext
from models.ops import latent_ops
from worker.kernels.cpu.latent_attention import PackedLatent
from worker.kernels.cpu.operations import Table

DTYPES = [torch.float32, torch.bfloat16]
_SCALE = 0.2


SHAPES = (
    Sizes(16, 512, 64, 128, 128),  # DeepSeek-V2-Lite
    Sizes(5, 32, 8, 24, 40),
    Sizes(20, 48, 10, 7, 72),
    Sizes(70, 80, 64, 8, 8),  # more heads than a tile has rows
    Sizes(1, 16, 2, 40, 33),
)


class Layer:
    """A layer with random matrices, and the tokens and cached rows of a step; unwritten rows are NaN."""

    def __init__(self, sizes: Sizes, step: ForwardContext, dtype: torch.dtype) -> None:
        self.sizes, self.step, self.dtype = sizes, step, dtype
        tokens, width = len(step.positions), sizes.rank + sizes.rope
        self.weight = torch.randn(sizes.heads * (sizes.nope + sizes.value), sizes.rank) / sizes.rank**0.5
        self.weight = self.weight.to(dtype)
        self.q = torch.randn(tokens, sizes.heads, sizes.nope + sizes.rope).to(dtype)
        self.latent = torch.randn(tokens, width).to(dtype)
        angles = 7 * torch.rand(tokens, sizes.rope // 2)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        size = step.block_size
        self.cache = torch.full((step.block_table.numel(), size, width), torch.nan).to(dtype)
        for table, new, total in zip(
            step.block_table.long(), step.query_lens_host, step.kv_lens_host, strict=True
        ):
            held = torch.arange(total - new)
            self.cache[table[held // size], held % size] = torch.randn(total - new, width).to(dtype)

    def attended(
        self, table: Table, step: ForwardContext | None = None, tokens: slice = slice(None)
    ) -> Tensor:
        """What some tokens become, as a step of their own; they are cached."""
        s = self.sizes
        up = table["pack_latent"](self.weight, s.heads, s.nope, s.rank)
        assert type(up) is PackedLatent
        given = self.q[tokens], self.latent[tokens], up, self.cache, step or self.step, self.cos_sin[tokens]
        return table["latent_attention"](*given, scale=_SCALE)

    def exact(self) -> tuple[Tensor, Tensor]:
        """The same in float64 by the reference, and the cache after it."""
        s, cache = self.sizes, self.cache.double()
        up = latent_ops.pack_latent(self.weight.double(), s.heads, s.nope, s.rank)
        given = self.q.double(), self.latent.double(), up, cache, self.step, self.cos_sin.double()
        return latent_ops.latent_attention(*given, scale=_SCALE), cache


def assert_near(out: Tensor, expected: Tensor) -> None:
    tolerance = 2e-5 if out.dtype == torch.float32 else 2**-5
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("new", "total"), [*STEPS, ([3, 1, 40], [3, 1, 41])])
def test_place_0_may_be_seen_by_none_but_itself(
    table: Table, dtype: torch.dtype, new: list[int], total: list[int]
) -> None:
    step = make_step(new, total, block_size=4)
    step.first = 1
    layer, behind = Layer(SHAPES[1], step, dtype), step.positions > 0
    exact, _ = layer.exact()
    out = layer.attended(table)
    assert out.isfinite().all()
    assert_near(out[behind], exact[behind])


@pytest.mark.parametrize(("dtype", "threads"), [(torch.float32, 2), (torch.bfloat16, 1)])
def test_equals_the_reference(level: str, dtype: torch.dtype, threads: int) -> None:
    """Both what tokens become and what is cached; rows that no sequence has written are not read."""
    use_threads(level, threads)
    for number, sizes in enumerate(SHAPES):
        for new, total in STEPS:
            layer = Layer(sizes, make_step(new, total, (32, 16, 5)[number % 3]), dtype)
            expected, cache = layer.exact()
            assert_near(layer.attended(table_of(level)), expected)
            assert_near(layer.cache, cache)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_rotation(level: str, dtype: torch.dtype) -> None:
    layer = Layer(SHAPES[1], make_step([3, 1], [3, 40], 16), dtype)
    layer.cos_sin = torch.cat([torch.ones(4, 4), torch.zeros(4, 4)], dim=1)
    turned = layer.attended(table_of(level))
    up = table_of(level)["pack_latent"](layer.weight, 5, 24, 32)
    given = layer.q, layer.latent, up, layer.cache, layer.step, None
    assert_same_bits(table_of(level)["latent_attention"](*given, scale=_SCALE), turned)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_has_the_same_bits_in_any_batch(level: str, dtype: torch.dtype) -> None:
    """Alone, its chunks are shared by threads, and its products have fewer rows."""
    table = table_of(level)
    for sizes in SHAPES[:3]:
        layer = Layer(sizes, make_step([1, 40, 1, 2, 129], [700, 40, 30, 300, 300], 32), dtype)
        together = layer.attended(table)
        for row, (start, stop) in enumerate(pairwise(layer.step.query_starts.tolist())):
            for threads in (1, 3):
                use_threads(level, threads)
                alone = layer.attended(table, rows_of(layer.step, row, row + 1), slice(start, stop))
                assert_same_bits(alone, together[start:stop])


def cut(layer: Layer, table: Table, ends: Sequence[int], *, apart: bool) -> Tensor:
    """A prompt in pieces that end at `ends`: each a step of its own, or a row of one step."""
    if apart:
        return torch.cat([cut(layer, table, pair, apart=False) for pair in pairwise(ends)])
    new = [stop - start for start, stop in pairwise(ends)]
    step = make_step(new, [*ends[1:]], layer.step.block_size)
    step.block_table = layer.step.block_table.repeat(len(new), 1)
    step.slot_mapping = layer.step.slot_mapping[ends[0] : ends[-1]]
    return layer.attended(table, step, slice(ends[0], ends[-1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SHAPES[:4], ids=str)
def test_a_prompt_has_the_same_bits_however_it_is_cut(level: str, dtype: torch.dtype, sizes: Sizes) -> None:
    table = table_of(level)
    for length in (random.randint(1, 60), random.randint(257, 300), random.randint(513, 530)):
        layer = Layer(sizes, make_step([length], [length], random.choice([4, 7, 32])), dtype)
        at_once = layer.attended(table)
        use_threads(level, random.randint(1, 3))
        piece = random.choice([2, 3, 17, 100])
        ends = [*range(0, length, piece), length]
        assert_same_bits(cut(layer, table, ends, apart=True), at_once)
        assert_same_bits(cut(layer, table, ends, apart=False), at_once)
        assert_same_bits(cut(layer, table, range(length + 1), apart=False), at_once)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_chosen_rows_are_read_as_a_sequence_of_their_own(
    level: str, dtype: torch.dtype, sizes: Sizes
) -> None:
    """Every token has the bits of one whose sequence is what was chosen for it, in any batch and threads."""
    table, most = table_of(level), 290
    layer = Layer(sizes, make_step([1, 12, 3], [700, 297, 40], 16), dtype)
    chosen = torch.full((16, most), -1, dtype=torch.int32)
    for token, position in enumerate(layer.step.positions.tolist()):
        some = torch.cat([torch.randperm(position)[: most - 1].sort().values, torch.tensor([position])])
        chosen[token, : len(some)] = some
    use_threads(level, 3)
    given = layer.q, layer.latent, table["pack_latent"](layer.weight, sizes.heads, sizes.nope, sizes.rank)
    out = table["latent_attention"](
        *given, layer.cache, layer.step, layer.cos_sin, scale=_SCALE, chosen=chosen
    )
    blocks = layer.step.block_table.long().repeat_interleave(torch.tensor([1, 12, 3]), dim=0)
    for token, some in enumerate(chosen.long()):
        some = some[some >= 0]
        alone = Layer(sizes, make_step([1], [len(some)], 7), dtype)
        own = alone.step.block_table[0].long()
        rows = layer.cache[blocks[token, some // 16], some % 16]
        at = torch.arange(len(some))
        alone.cache[own[at // 7], at % 7] = rows
        alone.q, alone.latent, alone.weight = (
            layer.q[token : token + 1],
            layer.latent[token : token + 1],
            layer.weight,
        )
        alone.cos_sin = layer.cos_sin[token : token + 1]
        assert_same_bits(alone.attended(table), out[token : token + 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_prompt_is_computed_in_blocks(level: str, dtype: torch.dtype) -> None:
    """More queries of all heads than are computed at once."""
    layer = Layer(SHAPES[3], make_step([100, 30], [100, 60], 16), dtype)
    assert_near(layer.attended(table_of(level)), layer.exact()[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_large_scores_have_the_same_bits(level: str, dtype: torch.dtype) -> None:
    """Latents of -0, and scores so far apart that whole chunks weigh nothing."""
    for factor in (0.0, 1e4):
        layer = Layer(SHAPES[1], make_step([600], [600], 16), dtype)
        layer.q *= factor
        layer.latent[:, ::2] = -0.0
        at_once = layer.attended(table_of(level))
        assert_same_bits(cut(layer, table_of(level), range(601), apart=False), at_once)


def test_a_nan_stays_in_its_sequence(level: str) -> None:
    layer = Layer(SHAPES[1], make_step([1, 30, 5], [9, 30, 40], 16), torch.float32)
    layer.latent[4] = torch.nan
    out = layer.attended(table_of(level))
    assert out[4:31].isnan().all()
    assert out[[0, *range(31, 36)]].isfinite().all()


@pytest.mark.parametrize(("dtype", "rank"), [(torch.float16, 32), (torch.float32, 24)])
def test_the_reference_computes_what_the_kernels_cannot(level: str, dtype: torch.dtype, rank: int) -> None:
    sizes = Sizes(3, rank, 8, 16, 16)
    table, layer = table_of(level), Layer(sizes, make_step([1, 30], [9, 30], 16), dtype)
    results: list[Tensor] = []
    for pack, attend in (
        (table["pack_latent"], table["latent_attention"]),
        (latent_ops.pack_latent, latent_ops.latent_attention),
    ):
        up = pack(layer.weight, sizes.heads, sizes.nope, sizes.rank)
        given = layer.q, layer.latent, up, layer.cache.clone(), layer.step, layer.cos_sin
        results.append(attend(*given, scale=_SCALE))
    assert torch.equal(*results)


def test_tensors_need_not_be_contiguous(level: str) -> None:
    table, layer = table_of(level), Layer(SHAPES[1], make_step([1, 30], [9, 30], 16), torch.float32)
    expected = layer.attended(table)
    layer.q = layer.q.repeat(1, 2, 1)[:, :5]
    layer.latent = layer.latent.repeat(1, 2)[:, :40]
    assert_same_bits(layer.attended(table), expected)
    layer.latent = layer.latent.t().contiguous().t()
    assert_same_bits(layer.attended(table), expected)


def test_tensors_that_do_not_fit_are_refused(level: str) -> None:
    table, layer = table_of(level), Layer(SHAPES[1], make_step([2], [2], 16), torch.float32)
    up = table["pack_latent"](layer.weight, 5, 24, 32)
    for wrong in (
        {"q": layer.q[:, :4]},
        {"q": layer.q[:, :, :-2]},
        {"latent": layer.latent[:1]},
        {"latent": layer.latent[:, :-2]},
        {"cache": layer.cache[:, :8]},
        {"cache": layer.cache.transpose(0, 1).contiguous().transpose(0, 1).expand(2, -1, -1)[:, :, ::1]},
        {"cos_sin": layer.cos_sin[:1]},
        {"cos_sin": torch.zeros(2, 10)},
        {"q": layer.q.bfloat16()},
    ):
        given = {"q": layer.q, "latent": layer.latent, "cache": layer.cache, "cos_sin": layer.cos_sin} | wrong
        with pytest.raises(ValueError, match="latent_attention"):
            table["latent_attention"](**given, up=up, context=layer.step, scale=_SCALE)
