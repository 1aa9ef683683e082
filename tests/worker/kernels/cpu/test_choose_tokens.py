"""The choice of tokens by the C kernel, for every level that this machine can run."""

import random
from itertools import pairwise

import pytest
import torch
from kernel_levels import table_of, use_threads
from paged import STEPS, make_step, rows_of
from torch import Tensor

from models.context import ForwardContext
from models.ops import latent_ops
from worker.kernels.cpu.operations import Table

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = ((64, 128, 64), (32, 128, 64), (5, 36, 10), (3, 16, 16), (1, 130, 64))
"""Heads, the width of each, and how much of it is rotated."""


class Indexer:
    """Random queries, weights and keys of a step; cached rows that nobody has written are NaN."""

    def __init__(self, shape: tuple[int, int, int], step: ForwardContext, dtype: torch.dtype) -> None:
        (heads, width, rotated), tokens, size = shape, len(step.positions), step.block_size
        self.step = step
        self.q = torch.randn(tokens, heads, width).to(dtype)
        self.key = torch.randn(tokens, width).to(dtype)
        self.weights = torch.randn(tokens, heads)
        angles = 7 * torch.rand(tokens, rotated // 2)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        self.cache = torch.full((step.block_table.numel(), size, width), torch.nan).to(dtype)
        for table, new, total in zip(
            step.block_table.long(), step.query_lens_host, step.kv_lens_host, strict=True
        ):
            held = torch.arange(total - new)
            self.cache[table[held // size], held % size] = torch.randn(total - new, width).to(dtype)

    def chosen(
        self, table: Table, most: int, step: ForwardContext | None = None, tokens: slice = slice(None)
    ) -> Tensor:
        """What is chosen for some tokens, as a step of their own; their keys are cached."""
        given = self.q[tokens], self.key[tokens], self.weights[tokens], self.cache, step or self.step
        return table["choose_tokens"](*given, self.cos_sin[tokens], most=most)


def assert_alike(chosen: Tensor, expected: Tensor) -> None:
    """Compare sets; of scores that are nearly equal, another one may have been chosen here and there."""
    assert chosen.dtype == torch.int32
    others = sum(len(set(a) - set(b)) for a, b in zip(chosen.tolist(), expected.tolist(), strict=True))
    assert others <= 3 + 2e-3 * chosen.numel()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_equals_the_reference(level: str, dtype: torch.dtype, threads: int) -> None:
    """Both what is chosen and what is cached."""
    use_threads(level, threads)
    for number, shape in enumerate(SHAPES):
        for new, total in STEPS:
            indexer = Indexer(shape, make_step(new, total, (32, 16, 5)[number % 3]), dtype)
            cache = indexer.cache.clone()
            expected = latent_ops.choose_tokens(
                *(indexer.q, indexer.key, indexer.weights, cache, indexer.step, indexer.cos_sin), most=29
            )
            assert_alike(indexer.chosen(table_of(level), 29), expected)
            torch.testing.assert_close(indexer.cache, cache, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_choice_is_the_same_in_any_batch_and_chunks(level: str, dtype: torch.dtype) -> None:
    table = table_of(level)
    for shape in SHAPES:
        indexer = Indexer(shape, make_step([1, 40, 1, 2, 129], [700, 40, 30, 300, 300], 32), dtype)
        together = indexer.chosen(table, 35)
        for row, (start, stop) in enumerate(pairwise(indexer.step.query_starts.tolist())):
            use_threads(level, random.randint(1, 3))
            alone = indexer.chosen(table, 35, rows_of(indexer.step, row, row + 1), slice(start, stop))
            assert torch.equal(alone, together[start:stop])
            for token in range(start, stop):
                step = rows_of(indexer.step, row, row + 1)
                place = slice(token - start, token - start + 1)
                total = step.kv_lens_host[0] - (stop - token) + 1
                single = make_step([1], [total], 32)
                single.block_table, single.slot_mapping = step.block_table, step.slot_mapping[place]
                one = indexer.chosen(table, 35, single, slice(token, token + 1))
                assert torch.equal(one, together[token : token + 1])


@pytest.mark.parametrize("most", [1, 30, 299, 300, 1000])
def test_of_equal_scores_the_earlier_are_chosen(level: str, most: int) -> None:
    """Scores are small whole numbers, which float32 has exactly, so that many are equal."""
    indexer = Indexer((4, 16, 16), make_step([60, 1], [300, 200], 16), torch.float32)
    for tensor in (indexer.q, indexer.key, indexer.weights, indexer.cache):
        tensor.copy_(torch.where(tensor.isnan(), tensor, tensor.round().clamp(-1, 1)))
    given = indexer.q, indexer.key, indexer.weights
    expected = latent_ops.choose_tokens(*given, indexer.cache.clone(), indexer.step, None, most=most)
    chosen = table_of(level)["choose_tokens"](*given, indexer.cache, indexer.step, None, most=most)
    assert torch.equal(chosen, expected)


def test_numbers_that_are_none_break_nothing(level: str) -> None:
    """Whatever scores are, so many positions are chosen, each once and in order."""
    indexer = Indexer(SHAPES[2], make_step([50], [400], 16), torch.float32)
    indexer.q[::3] = torch.nan
    indexer.weights[1::3] = torch.inf
    indexer.key[40:] = -torch.inf
    chosen = indexer.chosen(table_of(level), 77)
    assert (chosen.diff(dim=1) > 0).all()
    assert (chosen[:, 0] >= 0).all()
    assert (chosen[:, -1] <= indexer.step.positions).all()


def test_a_long_context_is_computed_in_blocks(level: str) -> None:
    """More scores of all tokens than there is room for at once."""
    indexer = Indexer((1, 2, 2), make_step([700, 3], [30000, 12], 32), torch.float32)
    chosen = indexer.chosen(table_of(level), 20)
    some = slice(690, 700)
    step = make_step([10], [30000], 32)
    step.block_table, step.slot_mapping = indexer.step.block_table[:1], indexer.step.slot_mapping[some]
    assert torch.equal(indexer.chosen(table_of(level), 20, step, some), chosen[some])
    assert chosen[-1].tolist() == [*range(12), *[-1] * 8]


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.float16, SHAPES[2]), (torch.float32, (65, 16, 8)), (torch.float32, (2, 15, 8))],
)
def test_the_reference_computes_what_the_kernel_cannot(
    level: str, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    indexer = Indexer(shape, make_step([1, 30], [9, 50], 16), dtype)
    chosen = indexer.chosen(table_of(level), 6)
    assert torch.equal(indexer.chosen(latent_ops.__dict__, 6), chosen)


def test_tensors_that_do_not_fit_are_refused(level: str) -> None:
    indexer = Indexer(SHAPES[2], make_step([2], [2], 16), torch.float32)
    given = {name: getattr(indexer, name) for name in ("q", "key", "weights", "cache", "cos_sin")}
    for wrong in (
        {"key": indexer.key[:1]},
        {"key": indexer.key[:, :-2]},
        {"weights": indexer.weights[:, :4]},
        {"cache": indexer.cache[:, :8]},
        {"cos_sin": indexer.cos_sin[:1]},
    ):
        with pytest.raises(ValueError, match="choose_tokens"):
            table_of(level)["choose_tokens"](**(given | wrong), context=indexer.step, most=3)
