"""Positions on three axes are those of transformers' models, for random layouts of text and media."""

import random
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from models.media.positions import three_axes

MERGE = 2
FAMILIES = {kind.__name__: kind for kind in (Qwen2VLModel, Qwen2_5_VLModel, Qwen3VLModel, Qwen3_5Model)}


@dataclass
class Item:
    at: int
    runs: list[tuple[int, int]]
    grid: tuple[int, int, int]
    interval: float = 1.0


def picture(at: int, rows: int, columns: int) -> Item:
    return Item(at, [(0, rows * columns)], (1, rows * MERGE, columns * MERGE))


def video(at: int, frames: int, rows: int, columns: int, between: int = 0) -> Item:
    """A video whose frames follow each other, or have so many tokens of text in front of each."""
    grid, size = (frames, rows * MERGE, columns * MERGE), rows * columns
    if not between:
        return Item(at, [(0, frames * size)], grid)
    return Item(at, [(between + frame * (between + size), size) for frame in range(frames)], grid)


def end_of(item: Item) -> int:
    return item.at + sum(item.runs[-1])


def layout(rng: random.Random, times: bool) -> tuple[int, list[Item]]:
    """A sequence's length and its items; `times` says that texts stand between the frames of videos."""
    items: list[Item] = []
    at = rng.choice([0, rng.randrange(1, 9)])
    for _ in range(rng.randrange(1, 5)):
        rows, columns = rng.choice([(1, 1), (1, 9), (7, 1), (rng.randrange(1, 6), rng.randrange(1, 6))])
        if rng.random() < 0.4:
            frames = rng.randrange(1, 5) if times else rng.randrange(1, max(rows, columns) + 1)
            items.append(video(at, frames, rows, columns, rng.randrange(1, 4) if times else 0))
        else:
            items.append(picture(at, rows, columns))
        at = end_of(items[-1]) + rng.randrange(1, 6)  # without a text between, transformers would join them
    return at if rng.random() < 0.5 else end_of(items[-1]), items


def expected(name: str, length: int, items: list[Item]) -> tuple[np.ndarray, int]:
    kind: Any = FAMILIES[name]
    types = torch.zeros(1, length, dtype=torch.int64)
    grids: dict[int, list[tuple[int, int, int]]] = {1: [], 2: []}
    for item in items:
        number = 1 if item.grid[0] == len(item.runs) == 1 else 2
        grids[number].append(item.grid)
        for first, count in item.runs:
            types[0, item.at + first : item.at + first + count] = number
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=1))
    model = SimpleNamespace(config=config)
    model.get_vision_position_ids = partial(kind.get_vision_position_ids, model)
    pictures, videos = (torch.tensor(grids[number]) if grids[number] else None for number in (1, 2))
    positions, constant = kind.get_rope_index(model, torch.zeros_like(types), types, pictures, videos)
    return positions[:, 0].numpy(), int(constant[0, 0])


@pytest.mark.parametrize("name", FAMILIES)
def test_random_layouts(name: str) -> None:
    rng = random.Random(7)
    for _ in range(200):
        length, items = layout(rng, times=name.startswith("Qwen3"))
        positions, constant = three_axes(length, items)
        wanted, wanted_constant = expected(name, length, items)
        np.testing.assert_array_equal(positions, wanted)
        if end_of(items[-1]) < length:  # behind a last picture transformers goes on from the largest position
            assert constant == wanted_constant


def test_a_text_alone() -> None:
    positions, constant = three_axes(5, [])
    assert constant == 0
    assert positions.tolist() == [[0, 1, 2, 3, 4]] * 3


def test_tokens_behind_the_prompt_are_one_constant_away() -> None:
    items = [picture(2, 3, 4), video(16, 3, 2, 2)]
    short, constant = three_axes(28, items)
    long, same = three_axes(90, items)
    assert constant == same
    assert long[:, :28].tolist() == short.tolist()
    assert long[:, 28:].tolist() == [[place + constant for place in range(28, 90)]] * 3


def test_pictures_without_a_text_between() -> None:
    items = [picture(0, 2, 3), picture(6, 2, 3)]
    first, second = np.split(three_axes(12, items)[0], 2, axis=1)
    np.testing.assert_array_equal(second, first + 3)


def test_a_text_follows_the_largest_position_of_a_long_video() -> None:
    """transformers lets it begin behind the longer side of a frame, where the time is past already."""
    positions, _ = three_axes(26, [video(1, 6, 2, 2)])
    assert positions[:, 25].tolist() == [1 + 6] * 3
    assert expected("Qwen2VLModel", 26, [video(1, 6, 2, 2)])[0][:, 25].tolist() == [1 + 2] * 3


def test_positions_never_fall_from_item_to_item() -> None:
    items = [picture(1, 4, 4), picture(20, 1, 9), video(31, 2, 2, 5, between=2)]
    positions, _ = three_axes(70, items)
    for before, after in pairwise(items):
        assert positions[:, : end_of(before)].max() < positions[:, after.at :].min()


@pytest.mark.parametrize("seconds", [0.3, 1.0, 1.7])
def test_time_runs_as_fast_as_the_video(seconds: float) -> None:
    """Only Qwen2.5-VL knows of it, with so many tokens for each second."""
    model: Any = Qwen2_5_VLModel
    given = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=4))
    )
    given.get_vision_position_ids = partial(model.get_vision_position_ids, given)
    types = torch.tensor([[0] * 3 + [2] * 6 * 4 + [0] * 2])
    grid = torch.tensor([(6, 2 * MERGE, 2 * MERGE)])
    wanted, _ = model.get_rope_index(
        given, torch.zeros_like(types), types, None, grid, second_per_grid_ts=[seconds]
    )
    item = Item(3, [(0, 24)], (6, 2 * MERGE, 2 * MERGE), interval=4 * seconds)
    positions, shift = three_axes(29, [item])
    np.testing.assert_array_equal(positions[:, :27], wanted[:, 0, :27].numpy())
    behind = 3 + max(2, int(5 * 4 * seconds) + 1)
    assert positions[:, 27:].tolist() == [[behind, behind + 1]] * 3
    assert shift == behind - 27
