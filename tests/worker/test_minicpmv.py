"""Tiny random models of MiniCPM-V give what is composed of torch's attention and parts of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from media_files import noise
from minicpmv import TEXTS, Composed
from opened import open_runner
from pictured import Engine, Prompts, tower_input

from models.config import read_config
from models.loader import LoadOptions, load_model
from models.towers.model import find_tower
from models.towers.tower import finish

OUTPUT = 4


class Written:
    """A tiny checkpoint, prompts with pictures of several sizes, and the answers to them."""

    def __init__(self, version: str, folder: Path) -> None:
        self.model, self.prompts = Composed(version, folder), Prompts(folder)
        self.pictures = [noise(40, 30), noise(100, 60), noise(31, 250), noise(230, 190)]
        small, wide, strip, large = self.pictures
        self.asked = [
            self.prompts.make([5, 9], small, [44, 7], wide, [12]),
            self.prompts.make([5, 9, 17, 44, 200, 7]),
            self.prompts.make(strip, large, [8]),
            self.prompts.make([5], large, [7], wide, large),
        ]


@pytest.mark.parametrize("version", TEXTS)
def test_pictures_and_texts_give_what_is_composed(version: str, tmp_path: Path) -> None:
    written = Written(version, tmp_path)
    tower: Any = find_tower(load_model(LoadOptions(read_config(tmp_path), tmp_path, dtype=torch.float32)))
    items = [tower_input(written.prompts.processor.prepare(picture)) for picture in written.pictures]
    ours = finish(tower.encode(items))
    for rows, item, picture in zip(ours, items, written.pictures, strict=True):
        theirs = written.model.rows(picture)
        assert len(rows) == len(theirs) == item.embeddings
        assert (rows - theirs).abs().max() <= 1e-4 * max(1.0, float(theirs.abs().max()))
    answers = [written.model.expected(prompt, OUTPUT) for prompt in written.asked]
    for chunk in (7, 512):
        runner = open_runner(
            tmp_path, max_num_seqs=4, block_size=4, num_gpu_blocks_override=512, max_model_len=400
        )
        engine = Engine(runner.launch, runner.facts, written.prompts, chunk=chunk)
        found = engine.run(written.asked, OUTPUT)
        for answer, other in zip(found, answers, strict=True):
            assert answer.tokens == other.tokens
            assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        alone = Engine(runner.launch, runner.facts, written.prompts, chunk=chunk)
        assert alone.run(written.asked[-1:], OUTPUT) == found[-1:]
