"""The blocks of queries that programs compute: every new token of every row lies in exactly one."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from worker.kernels.cuda.attention_plan import (
    Blocks,
    Heads,
    Kind,
    enough_rows,
    least_keys,
    plan_prompts_and_decodes,
    plan_texts,
    room_for_large_blocks,
    room_for_prompts_and_decodes,
)
from worker.kernels.cuda.capabilities import LEAST_MADE, Tiles

TILES = {Kind.SHORT: Tiles(16, 64, 4, 3), Kind.LONG: Tiles(128, 64, 8, 3), Kind.MADE: Tiles(64, 32, 8, 2)}


def tokens_of(blocks: Blocks, heads: Heads, new: list[int]) -> list[tuple[int, int]]:
    each = TILES[blocks.kind].queries // (1 if blocks.kind is Kind.MADE else heads.group)
    firsts = blocks.tokens
    if blocks.kind is Kind.SHORT:
        splits, others = firsts & 0xFFFF, firsts >> 16
        assert (
            (splits <= others).all()
            and (others[: blocks.split] > 0).all()
            and not firsts[blocks.split :].any()
        )
        blocks, firsts = replace(blocks, rows=blocks.rows[splits == 0]), 0 * firsts[splits == 0]
    return [
        (int(row), token)
        for row, first in zip(blocks.rows, firsts, strict=True)
        for token in range(first, min(first + each, new[row]))
    ]


@pytest.mark.parametrize("made_of", [0, 128])
@pytest.mark.parametrize("group", [1, 4, 7, 16])
def test_every_token_is_computed_once(group: int, made_of: int) -> None:
    drawn = random.Random(group)
    heads = Heads(2 * group, 2, 64, made_of)
    for _ in range(50):
        new = [drawn.choice([1, 1, 2, 15, 16, 17, 200]) for _ in range(drawn.randint(1, 9))]
        total = [count + drawn.choice([0, drawn.randint(0, 500)]) for count in new]
        planned = plan_prompts_and_decodes(new, total, heads, TILES, 132)
        made = [token for blocks in planned for token in tokens_of(blocks, heads, new)]
        assert Counter(made) == Counter(
            (row, token) for row, count in enumerate(new) for token in range(count)
        )
        assert len({blocks.kind for blocks in planned}) == len(planned) <= (3 if made_of else 2)
        assert all(blocks.split == 0 for blocks in planned if blocks.kind is not Kind.SHORT)


def test_blocks_that_read_most_keys_begin() -> None:
    heads = Heads(1, 1, 64)
    (blocks,) = plan_prompts_and_decodes([300, 300], [300, 5000], heads, TILES, 132)
    assert blocks.rows.tolist() == [1, 1, 1, 0, 0, 0]
    assert blocks.tokens.tolist() == [256, 128, 0, 256, 128, 0]
    (texts,) = plan_texts([20, 300, 7], heads, TILES[Kind.LONG])
    assert texts.rows.tolist() == [1, 1, 1, 0, 2]


@pytest.mark.parametrize(
    ("rows", "longest", "splits"),
    [
        (1, 100, 1),
        (1, 512, 2),
        (1, 4096, 16),
        (1, 100_000, 30),
        (64, 4096, 1),
        (32, 2048, 1),
        (29, 2048, 2),
        (16, 4096, 2),
        (256, 4096, 1),
    ],
)
def test_keys_are_split_where_processors_would_be_idle(rows: int, longest: int, splits: int) -> None:
    heads = Heads(32, 8, 128)
    (blocks,) = plan_prompts_and_decodes([1] * rows, [longest] * rows, heads, TILES, 132)
    assert (len(blocks.rows), blocks.split) == (rows * splits, rows * splits * (splits > 1))


@pytest.mark.parametrize("keys", [1, 2, 8, 32])
def test_no_program_of_a_mix_reads_more_than_twice_the_mean(keys: int) -> None:
    """The mean is of two programs for each multiprocessor. Every mix finds room in a graph, too."""
    drawn = random.Random(keys)
    for number in range(1000):
        heads = Heads(4 * keys, keys, 128, 128 * (number % 2))
        rows = drawn.choice([1, 2, 5, 16, 48, 64, 256, 512])
        kinds = [drawn.randint(1, drawn.choice([100, 1000, 8000, 130_000])) for _ in range(3)]
        total = [drawn.choice(kinds) for _ in range(rows)]
        (blocks,) = plan_prompts_and_decodes([1] * rows, total, heads, TILES, 132)
        splits = Counter(blocks.rows.tolist())
        longest = max(-(-keys // splits[row]) for row, keys in enumerate(total))
        assert longest <= max(least_keys(heads), 2 * -(-sum(total) // enough_rows(heads, 132)))
        assert blocks.split == sum(count for count in splits.values() if count > 1)
        room = room_for_prompts_and_decodes(rows, rows, max(total), heads, TILES, 132)[0]
        assert len(blocks.rows) <= room.size and blocks.split <= room.split


def test_latents_of_a_prompt_that_follows_nothing_become_keys_and_values() -> None:
    """Each pair of tokens takes 320 products in place of 1,088 then, with the widths of DeepSeek."""
    heads = Heads(16, 1, 576, 128)
    new, total = [2000, 1, 500, LEAST_MADE, LEAST_MADE - 1], [2000, 900, 600, LEAST_MADE, LEAST_MADE - 1]
    planned = plan_prompts_and_decodes(new, total, heads, TILES, 132)
    rows = {blocks.kind: sorted({*blocks.rows.tolist()}) for blocks in planned}
    assert rows == {Kind.SHORT: [1], Kind.LONG: [2, 4], Kind.MADE: [0, 3]}


@pytest.mark.parametrize("made_of", [0, 128])
@pytest.mark.parametrize("group", [1, 2, 7, 16])
def test_every_step_up_to_some_size_finds_room(group: int, made_of: int) -> None:
    drawn = random.Random(group)
    heads = Heads(2 * group, 2, 64, made_of)
    least_left: dict[Kind, int] = {}
    for _ in range(300):
        tokens, most_rows = drawn.choice([16, 64, 512, 2048, 8192]), drawn.choice([3, 16, 256, 512])
        new: list[int] = []
        longest = drawn.choice([1, 3, 16 // group + 1, LEAST_MADE + 1, tokens])
        while len(new) < most_rows and (left := tokens - sum(new)):
            new.append(drawn.randint(1, min(left, longest)))
        rooms = room_for_prompts_and_decodes(tokens, most_rows, 4096, heads, TILES, 132)
        for blocks in plan_prompts_and_decodes(new, new, heads, TILES, 132):
            (room,) = [each for each in rooms if each.kind is blocks.kind]
            assert len(blocks.rows) <= room.size
            left = room.size - len(blocks.rows)
            least_left[blocks.kind] = min(left, least_left.get(blocks.kind, left))
        room = room_for_large_blocks(tokens, min(most_rows, tokens), TILES[Kind.LONG].queries // group)
        assert len(plan_texts(new, heads, TILES[Kind.LONG])[0].rows) <= room.size
    assert least_left.pop(Kind.SHORT) >= 0
    assert max(least_left.values()) <= 2, "no room is left idle in the fullest step"
