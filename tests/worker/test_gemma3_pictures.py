"""Gemma 3 on a tiny text and tower: tokens of a picture see all of it, in layers with a window and others."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gemma_pictured import FIELDS, SETTINGS, inputs
from media_files import noise
from opened import open_runner
from pictured import Engine, Prompts, assert_answers, expected, tower_input, write_pictured
from PIL.Image import Image
from ranks import Layout, Ranks, RanksOfTests
from sizes import worker_config

from models.config import ConfigError, read_config
from models.loader import LoadOptions, load_model
from models.media.registry import find_media, make_processor

OUTPUT = 5
SIZES: dict[str, Any] = {
    "max_num_seqs": 6,
    "block_size": 4,
    "num_gpu_blocks_override": 256,
    "max_model_len": 64,
    "cpu_threads": 1,
}


class Gemma3:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_pictured("Gemma3ForConditionalGeneration", folder, FIELDS, SETTINGS)
        self.prompts = Prompts(folder)
        one, two = noise(40, 28), noise(31, 90)
        make = self.prompts.make
        self.asked = [
            make([5, 9, 17, 4, 8, 2, 33, 71], one, [44, 200, 7]),
            make([5, 9, 17, 44, 200, 7, 12, 13, 14, 15]),
            make(one, two, [12]),
            make([5, 6], two, [80, 81, 82, 83], one),
            make([5], one, [7, 8], one, one, [3, 9, 10, 11, 12, 13, 14, 15]),
        ]
        self.answers = [expected(self.model, each, OUTPUT, inputs) for each in self.asked]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Gemma3:
    return Gemma3(tmp_path_factory.mktemp("gemma3"))


@pytest.mark.parametrize("chunk", [1, 3, 9, 512])
def test_prompts_with_pictures_get_the_tokens_of_transformers(gemma: Gemma3, chunk: int) -> None:
    runner = open_runner(gemma.folder, **SIZES)
    assert runner.facts.whole_media
    engine = Engine(runner.launch, runner.facts, gemma.prompts, chunk=chunk)
    assert_answers(engine.run(gemma.asked, OUTPUT, ahead=chunk % 2), gemma.answers)


def test_tokens_of_a_picture_see_later_ones(gemma: Gemma3) -> None:
    """Otherwise the answers would be others, so the comparison above shows that they do."""

    def causal(pictures: list[Image], ids: list[int]) -> dict[str, Any]:
        return {"pixel_values": inputs(pictures, ids)["pixel_values"]}

    other = expected(gemma.model, gemma.asked[2], OUTPUT, causal)
    assert other.logprobs != pytest.approx(gemma.answers[2].logprobs, abs=1e-3)


@pytest.mark.parametrize("layout", [Layout(2), Layout(1, 2)], ids=str)
def test_ranks_give_the_tokens_of_one(gemma: Gemma3, layout: Layout, ranks: Ranks) -> None:
    config = worker_config(folder=str(gemma.folder), model=read_config(gemma.folder), **SIZES)
    executor = RanksOfTests(ranks, layout, config)
    engine = Engine(executor.submit, executor.start(), gemma.prompts, chunk=6)
    assert_answers(engine.run(gemma.asked, OUTPUT), gemma.answers)
    executor.stop()


def test_an_item_has_the_same_bits_alone_and_beside_others(gemma: Gemma3) -> None:
    model: Any = load_model(LoadOptions(read_config(gemma.folder), gemma.folder, dtype=torch.float32))
    items = [tower_input(item) for item in gemma.prompts.items.values()]
    together = model.encode([*items, *items[::-1]])
    for item, rows in zip(items, together, strict=False):
        assert rows.shape == (4, 32)
        assert torch.equal(model.encode([item])[0], rows)


@pytest.mark.parametrize("count", [3, 9])
def test_tokens_that_are_no_equal_squares_are_refused(gemma: Gemma3, tmp_path: Path, count: int) -> None:
    config = json.loads((gemma.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "mm_tokens_per_image": count}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    files = find_media(tmp_path)
    assert files is not None
    with pytest.raises(ConfigError, match="does not cut 4 x 4 patches"):
        make_processor(files)
