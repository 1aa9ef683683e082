"""Tokens behind pictures with three axes are replayed, at the positions that their sequences give them."""

from pathlib import Path

import pytest
from interpreted_device import ON_A_CARD, Interpreted
from opened import open_runner
from pictured import Engine
from qwen_pictured import OUTPUT, Pictured

pytestmark = pytest.mark.skipif(ON_A_CARD, reason="on a card, workers use its kernels anyway")


def test_tokens_behind_pictures_are_replayed(tmp_path: Path, device: Interpreted) -> None:
    pictured = Pictured.write("Qwen2VLForConditionalGeneration", tmp_path)
    runner = open_runner(tmp_path, max_num_seqs=3, block_size=4, max_model_len=40, num_gpu_blocks_override=64)
    while runner.prepare():
        pass
    engine = Engine(runner.launch, runner.facts, pictured.prompts)
    before = len(device.graphs.replayed)
    answers = engine.run(pictured.asked[1:3], OUTPUT)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in pictured.answers[1:3]]
    assert len(device.graphs.replayed) == before + OUTPUT - 1, "all steps but the first"
    runner.close()
