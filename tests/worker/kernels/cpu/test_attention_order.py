"""The order of sums in causal attention: a query has the same bits however its row is computed."""

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from equal_bits import assert_same_bits
from kernel_levels import NAMES, table_of, use_threads
from paged import make_cache, make_step, rows_of, unfit
from torch import Tensor

from models.context import ForwardContext
from worker.kernels.cpu.operations import Table

DIMS = (32, 64, 80, 96, 128, 256, 512)
CACHES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.int8),
    (torch.bfloat16, torch.int8),
]
"""Number types of queries and of the cache."""
PIECES = (2, 3, 17, 64, 100)
"""New tokens of the rows into which a prompt is cut."""


@dataclass
class Prompt:
    """A sequence whose keys and values are in the cache, with the query of every position."""

    table: Table
    whole: ForwardContext
    q: Tensor
    kv: Tensor
    limits: dict[str, Any]

    def rows(self, ends: list[int]) -> Tensor:
        """The results of one step that has a row for every two neighbours of `ends`."""
        new = [stop - start for start, stop in pairwise(ends)]
        step = make_step(new, ends[1:], self.whole.block_size)
        step.block_table = self.whole.block_table.repeat(len(new), 1)
        return self.table["attention"](self.q[ends[0] : ends[-1]], self.kv, step, **self.limits)

    def alone(self, ends: list[int]) -> Tensor:
        """The same results as of `rows`, with a step for each row."""
        return torch.cat([self.rows([*pair]) for pair in pairwise(ends)])


def make_prompt(
    table: Table,
    length: int,
    dtype: torch.dtype,
    dim: int,
    *,
    cached: torch.dtype | None = None,
    sunk: bool = False,
    sloped: bool = False,
    biased: bool = False,
    **limits: Any,
) -> Prompt:
    group, kv_heads = (1, 2) if biased else random.choice([(1, 2), (2, 1), (3, 2), (4, 1), (5, 1), (8, 1)])
    whole = make_step([length], [length], random.choice([4, 16, 32]))
    q = 2 * torch.randn(length, group * kv_heads, dim).to(dtype)
    heads = group * kv_heads
    limits |= {"scale": dim**-0.5, "sinks": torch.randn(heads) if sunk else None}
    limits |= {"slopes": torch.rand(heads) / 8 if sloped else None}
    limits |= {"bias": torch.randn(heads, 2 * random.choice([5, 128]) + 1) if biased else None}
    return Prompt(table, whole, q, make_cache(whole, kv_heads, dim, cached or dtype), limits)


def cut(length: int, piece: int) -> list[int]:
    return [*range(0, length, piece), length]


@pytest.mark.parametrize(("dtype", "cached"), CACHES)
@pytest.mark.parametrize("dim", DIMS)
def test_a_query_has_the_same_bits_in_any_row(
    level: str, dtype: torch.dtype, cached: torch.dtype, dim: int
) -> None:
    for length, window, softcap, sunk in (
        (random.randint(1, 64), None, None, False),
        (random.randint(65, 200), random.choice([1, 7, 63, 64]), None, True),
        (random.randint(257, 300), None, random.choice([0.7, 50.0]), False),
        (random.randint(513, 530), random.randint(200, 300), 5.0, True),
    ):
        limits: dict[str, Any] = {
            "cached": cached,
            "window": window,
            "softcap": softcap,
            "sunk": sunk,
            "sloped": length % 2 == 0,
            "biased": length % 3 == 0,
        }
        prompt = make_prompt(table_of(level), length, dtype, dim, **limits)
        at_once = prompt.rows([0, length])
        use_threads(level, random.randint(1, 2))
        assert_same_bits(prompt.rows(cut(length, 1)), at_once)
        assert_same_bits(prompt.rows(cut(length, random.choice(PIECES))), at_once)


@pytest.mark.parametrize(("dtype", "cached"), CACHES)
@pytest.mark.parametrize("window", [None, 700])
def test_a_query_has_the_same_bits_in_any_step(
    level: str, dtype: torch.dtype, cached: torch.dtype, window: int | None
) -> None:
    """Threads share the chunks of a row that is alone in its step."""
    length = 1500
    prompt = make_prompt(
        table_of(level), length, dtype, 32, cached=cached, window=window, sloped=window is None
    )
    at_once = prompt.rows([0, length])
    assert_same_bits(prompt.alone(cut(length, 100)), at_once)
    for threads in (1, 2, 3):
        use_threads(level, threads)
        for end in (1, 2, 63, 64, 65, 256, 257, 700, 701, 832, 1024, 1025, length):
            assert_same_bits(prompt.rows([end - 1, end]), at_once[end - 1 : end])


@pytest.mark.parametrize(("dtype", "cached"), CACHES)
@pytest.mark.parametrize("dim", DIMS)
def test_rows_that_follow_each_other_have_the_same_bits_together(
    level: str, dtype: torch.dtype, cached: torch.dtype, dim: int
) -> None:
    """As guesses do. What the last one leaves in the cache is not finite, and the others do not see it."""
    for start in (1, 60, random.randint(245, 256), random.randint(257, 767), 1020):
        sunk, softcap, window = random.choice([(False, None, None), (True, 5.0, 2000), (True, None, 258)])
        end = start + random.randint(2, 12)
        limits: dict[str, Any] = {"cached": cached, "sunk": sunk, "softcap": softcap, "window": window}
        prompt = make_prompt(table_of(level), end, dtype, dim, **limits)
        size = prompt.whole.block_size
        last_block = prompt.whole.block_table[0, (end - 1) // size]
        prompt.kv[:, last_block, :, (end - 1) % size] = unfit(cached)
        ends = [*range(start - 1, end + 1)]
        alone = prompt.alone(ends)
        assert alone[:-1].isfinite().all()
        assert alone[-1].isnan().all()
        for threads in (1, 2, 3):
            use_threads(level, threads)
            together = prompt.rows(ends)
            assert_same_bits(together[:-1], alone[:-1])
            assert together[-1].isnan().all()


def test_rows_of_different_sequences_are_not_taken_for_one(level: str) -> None:
    """Each is one token longer than the one before; the last two share blocks, but not their last one."""
    step = make_step([1] * 5, [300, 301, 302, 320, 321], block_size=16)
    step.block_table[4, :19] = step.block_table[3, :19]
    kv, q = make_cache(step, 2, 64, torch.float32), torch.randn(5, 6, 64)
    together = table_of(level)["attention"](q, kv, step, scale=0.1)
    for row in range(5):
        alone = table_of(level)["attention"](q[row : row + 1], kv, rows_of(step, row, row + 1), scale=0.1)
        assert_same_bits(alone, together[row : row + 1])


@pytest.mark.parametrize(("dtype", "cached"), CACHES)
def test_zeros_and_large_scores_have_the_same_bits_in_any_row(
    level: str, dtype: torch.dtype, cached: torch.dtype
) -> None:
    """Values of -0, scores so far apart that whole chunks weigh nothing, and equal scores."""
    for factor in (0.0, 1.0, 1e4):
        prompt = make_prompt(table_of(level), 600, dtype, 64, cached=cached, window=300)
        prompt.q *= factor
        prompt.kv[1, :, :, :, ::2] = -0.0
        assert_same_bits(prompt.rows(cut(600, 1)), prompt.rows([0, 600]))


@pytest.mark.skipif("amx" not in NAMES, reason="this processor has no AMX")
@pytest.mark.parametrize("new", [1, 4])
def test_amx_adds_even_and_odd_keys_apart(new: int) -> None:
    """In the order of keys the first 1 would be lost beside 2^24, however many new tokens a row has."""
    step = make_step([new], [4], 16)
    kv = torch.zeros(2, 1, 1, 16, 64, dtype=torch.bfloat16)
    kv[1, 0, 0, :4] = torch.tensor([2.0**24, 1, -(2.0**24), 1])[:, None]
    out = table_of("amx")["attention"](torch.zeros(new, 3, 64, dtype=torch.bfloat16), kv, step, scale=1.0)
    assert (out[-1] == (1 + 1) / 4).all()


def test_a_row_reads_nothing_before_its_window(level: str) -> None:
    prompt = make_prompt(table_of(level), 600, torch.float32, 64, window=37)
    expected = prompt.rows([599, 600])
    size = prompt.whole.block_size
    prompt.kv[:, prompt.whole.block_table[0, : (600 - 37) // size].long()] = torch.nan
    assert_same_bits(prompt.rows([599, 600]), expected)
