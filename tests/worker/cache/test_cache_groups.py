"""How layers share the blocks of a cache: the groups they make, and their places in memory."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch
from sizes import worker_config

from models.layers.attention import Attention, CachedAttention
from worker.cache.cache_groups import CacheLayout, lay_out_cache
from worker.cache.kv_cache_size import size_cache
from worker.capacity import CacheBudget, WorkerLimits
from worker.devices.cpu import Cpu
from worker.worker_facts import blocks_held

LIMITS = WorkerLimits(block_size=16, max_num_seqs=4, max_num_batched_tokens=256, max_model_len=8192)
MORE = 63
"""The positions before a window that kernels may read."""


def layers(*shapes: tuple[int, int | None, int, int]) -> list[CachedAttention]:
    """So many layers with a window, key heads and a head's width, in turn."""
    return [
        Attention(heads=kv_heads, kv_heads=kv_heads, head_dim=width, scale=1.0, window=window)
        for count, window, kv_heads, width in shapes
        for _ in range(count)
    ]


def laid_out(
    given: list[CachedAttention],
    minimum: Callable[[int], int] = int,
    *,
    keeps_all: bool = False,
    dtype: torch.dtype = torch.float32,
) -> CacheLayout:
    return lay_out_cache(given, LIMITS, dtype, minimum, keeps_all=keeps_all)


@pytest.mark.parametrize(
    ("shapes", "groups", "arrays"),
    [
        ([(10, None, 2, 8), (52, 1024, 2, 8)], (0,) + (1024 + MORE,) * 6, 10),  # Gemma 3 27B
        ([(12, None, 2, 8), (12, 128, 2, 8)], (0, 128 + MORE), 12),  # gpt-oss 20B
        ([(8, None, 2, 8), (24, 4096, 2, 8)], (0,) + (4096 + MORE,) * 3, 8),  # Cohere 2, OLMo 3, EXAONE 4
        ([(32, 4096, 2, 8)], (4096 + MORE,), 32),  # Mistral
        ([(32, None, 2, 8)], (0,), 32),
        ([(16, None, 2, 8), (16, 8192, 2, 8)], (0,), 32),  # windows that hold every sequence
        ([(4, None, 2, 8), (4, 256, 2, 8), (8, 1024, 2, 8)], (0, 319, 1087, 1087), 4),
    ],
)
def test_groups_have_about_as_many_layers(
    shapes: list[tuple[int, int | None, int, int]], groups: tuple[int, ...], arrays: int
) -> None:
    layout = laid_out(layers(*shapes))
    assert layout.windows == groups
    assert layout.block_bytes == arrays * 2 * 2 * 8 * 16 * 4
    assert set(layout.shares) == {1}


def test_rows_of_codes_have_their_scales_behind_them() -> None:
    plain = laid_out(layers((4, None, 2, 64)), dtype=torch.int8)
    assert plain.block_bytes == 4 * 2 * 2 * 16 * (64 + 2)
    grouped = laid_out(layers((8, None, 2, 64), (24, 4096, 2, 64)), dtype=torch.int8)
    assert grouped.windows == (0,) + (4096 + MORE,) * 3
    assert grouped.block_bytes == 8 * 2 * 2 * 16 * (64 + 2)
    grouped.bind(5, Cpu(1))
    for group in grouped.groups:
        assert {layer.bound().shape for layer in group.layers} == {(2, 5, 2, 16, 66)}
        assert {layer.bound().dtype for layer in group.layers} == {torch.int8}


def test_layers_that_need_half_a_piece_lie_side_by_side() -> None:
    """Gemma 4: layers without a window have wider heads, but fewer."""
    layout = laid_out(layers((10, None, 4, 512), (50, 1024, 16, 256)))
    assert layout.windows == (0,) + (1024 + MORE,) * 10
    assert layout.shares == [2] + [1] * 10
    assert layout.block_bytes == 5 * 2 * 16 * 256 * 16 * 4


@pytest.mark.parametrize(
    "shapes",
    [
        [(2, None, 2, 8), (4, 64, 2, 8)],
        [(4, None, 1, 16), (6, 64, 4, 8)],
        [(3, None, 3, 8), (5, 64, 2, 8)],  # no piece is as large as the blocks of some layers
        [(2, None, 1, 8), (3, 64, 2, 8), (1, 200, 4, 8)],
        [(5, 64, 2, 8)],
    ],
)
def test_no_two_blocks_overlap(shapes: list[tuple[int, int | None, int, int]]) -> None:
    """Let every block belong to some group, and write to all layers of that."""
    blocks, rnd = 7, random.Random(1)
    layout = laid_out(layers(*shapes))
    parts = layout.bind(blocks, Cpu(1))
    assert sum(part.nbytes for part in parts) == blocks * layout.block_bytes
    assert all(part.is_contiguous() and len(part) == blocks for part in parts)
    places = [
        (layer.bound(), number * group.share)
        for number in range(blocks)
        for group in [rnd.choice(layout.groups)]
        for layer in group.layers
    ]
    for value, (kv, place) in enumerate(places):
        kv[:, place] = value
    for value, (kv, place) in enumerate(places):
        assert (kv[:, place] == value).all()
    assert all(layer.group == at for at, group in enumerate(layout.groups) for layer in group.layers)


def test_stages_have_as_many_groups_of_each_kind() -> None:
    """The first has three layers of a kind, and the second has none of it."""
    stages = [
        layers((3, None, 2, 8), (5, 128, 2, 8)),
        layers((4, 128, 2, 8), (2, 512, 2, 8)),
    ]
    meeting, told = Barrier(2), [0, 0]

    def run(stage: int) -> CacheLayout:
        def minimum(number: int) -> int:
            told[stage] = number
            meeting.wait(10)
            least = min(told)
            meeting.wait(10)
            return least

        return laid_out(stages[stage], minimum)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert first.windows == second.windows == (0, 191, 191, 575)
    assert [len(group.layers) for group in first.groups] == [3, 3, 2, 0]
    assert [len(group.layers) for group in second.groups] == [0, 2, 2, 2]


def test_hidden_states_of_all_positions_keep_all_blocks() -> None:
    assert laid_out(layers((2, None, 2, 8), (4, 64, 2, 8)), keeps_all=True).windows == (0,)


def test_a_sequence_needs_fewer_blocks_for_windows() -> None:
    windows = (0, 100, 100)
    assert blocks_held(1600, 1, 16, windows) == 100 + 2 * 8
    assert blocks_held(1600, 64, 16, windows) == 100 + 2 * 12
    assert blocks_held(40, 64, 16, windows) == 3 * 3
    for last in range(100, 200):  # wherever a window begins in a block
        assert last // 16 - (last - 99) // 16 + 1 <= blocks_held(10**6, 1, 16, (100,)) == 8


def test_lengths_that_fit_are_those_of_windows() -> None:
    windows, budget = (0, 1024 + MORE), CacheBudget(300 * 1000, "--x", 1 << 40)
    size = size_cache(worker_config(), LIMITS, 1000, budget, windows=windows)
    assert size.num_blocks == 300
    fits = size.max_model_len
    assert blocks_held(fits, 256, 16, windows) <= 300 < blocks_held(fits + 1, 256, 16, windows)
    all_slots = size_cache(worker_config(), LIMITS, 1, replace(budget, nbytes=1 << 40), windows=windows)
    assert all_slots.num_blocks == 4 * blocks_held(8192, 1, 16, windows) + 16
