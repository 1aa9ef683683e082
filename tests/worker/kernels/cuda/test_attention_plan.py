"""The blocks of queries that programs compute: every new token of every row lies in exactly one."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from worker.kernels.cuda.attention_plan import (
    Blocks,
    Heads,
    plan_prompts_and_decodes,
    plan_texts,
    room_for_large_blocks,
    room_for_prompts_and_decodes,
)
from worker.kernels.cuda.capabilities import Tiles

SHORT, LONG = Tiles(16, 64, 4, 3), Tiles(128, 64, 8, 3)


def tokens_of(blocks: Blocks, tiles: Tiles, heads: Heads, new: list[int]) -> list[tuple[int, int]]:
    each = tiles.queries // heads.group
    return [
        (int(row), token)
        for row, first in zip(blocks.rows, blocks.tokens, strict=True)
        for token in range(first, min(first + each, new[row]))
    ]


@pytest.mark.parametrize("group", [1, 4, 7, 16])
def test_every_token_is_computed_once(group: int) -> None:
    drawn = random.Random(group)
    heads = Heads(2 * group, 2, 64)
    for _ in range(50):
        new = [drawn.choice([1, 1, 2, 15, 16, 17, 200]) for _ in range(drawn.randint(1, 9))]
        total = [count + drawn.randint(0, 500) for count in new]
        planned = plan_prompts_and_decodes(new, total, heads, SHORT, LONG, 132)
        made = [
            token
            for blocks in planned
            for token in tokens_of(blocks, SHORT if blocks.short else LONG, heads, new)
        ]
        assert Counter(made) == Counter(
            (row, token) for row, count in enumerate(new) for token in range(count)
        )
        assert len(planned) <= 2
        assert all(blocks.splits == 1 for blocks in planned if not blocks.short)


def test_blocks_that_read_most_keys_begin() -> None:
    heads = Heads(1, 1, 64)
    (blocks,) = plan_prompts_and_decodes([300, 300], [300, 5000], heads, SHORT, LONG, 132)
    assert blocks.rows.tolist() == [1, 1, 1, 0, 0, 0]
    assert blocks.tokens.tolist() == [256, 128, 0, 256, 128, 0]
    (texts,) = plan_texts([20, 300, 7], heads, LONG)
    assert texts.rows.tolist() == [1, 1, 1, 0, 2]


@pytest.mark.parametrize(
    ("rows", "longest", "splits"),
    [
        (1, 100, 1),
        (1, 512, 2),
        (1, 4096, 16),
        (1, 100_000, 32),
        (64, 4096, 1),
        (32, 2048, 1),
        (30, 2048, 2),
        (16, 4096, 2),
        (256, 4096, 1),
    ],
)
def test_keys_are_split_where_processors_would_be_idle(rows: int, longest: int, splits: int) -> None:
    heads = Heads(32, 8, 128)
    (blocks,) = plan_prompts_and_decodes([1] * rows, [longest] * rows, heads, SHORT, LONG, 132)
    assert (len(blocks.rows), blocks.splits) == (rows, splits)


@pytest.mark.parametrize("group", [1, 2, 7, 16])
def test_every_step_up_to_some_size_finds_room(group: int) -> None:
    drawn = random.Random(group)
    heads = Heads(2 * group, 2, 64)
    least_left: dict[bool, int] = {}
    for _ in range(300):
        tokens, most_rows = drawn.choice([16, 64, 512, 2048]), drawn.choice([3, 16, 256, 512])
        new: list[int] = []
        longest = drawn.choice([1, 3, SHORT.queries // group + 1, tokens])
        while len(new) < most_rows and (left := tokens - sum(new)):
            new.append(drawn.randint(1, min(left, longest)))
        rooms = room_for_prompts_and_decodes(tokens, most_rows, 4096, heads, LONG, 132)
        for blocks in plan_prompts_and_decodes(new, new, heads, SHORT, LONG, 132):
            (room,) = [each for each in rooms if each.short is blocks.short]
            assert len(blocks.rows) <= room.size
            left = room.size - len(blocks.rows)
            least_left[blocks.short] = min(left, least_left.get(blocks.short, left))
        room = room_for_large_blocks(tokens, min(most_rows, tokens), LONG.queries // heads.group)
        assert len(plan_texts(new, heads, LONG)[0].rows) <= room.size
    assert least_left[True] == 0
    assert least_left[False] <= 1, "no room is left idle in the fullest step"
