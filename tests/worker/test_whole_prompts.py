"""PaliGemma on tiny texts: tokens of a prompt see all of it, past windows too; those of an answer do not."""

from pathlib import Path
from typing import Any

import paligemma_pictured
import pytest
from media_files import noise
from opened import open_runner
from pictured import Engine, Prompts, assert_answers, expected
from safetensors.torch import load_file, save_file

from models.config import ConfigError

OUTPUT = 9
SIZES: dict[str, Any] = {
    "max_num_seqs": 6,
    "block_size": 4,
    "num_gpu_blocks_override": 256,
    "max_model_len": 64,
    "cpu_threads": 1,
}


class PaliGemma:
    def __init__(self, version: int, folder: Path) -> None:
        self.folder = folder
        self.model: Any = paligemma_pictured.write(version, folder)
        self.prompts = Prompts(folder)
        one, two = noise(40, 28), noise(31, 90)
        make = self.prompts.make
        self.asked = [
            make(one, [5, 9, 17, 4, 8, 2, 33, 71, 44, 200, 7]),
            make([5, 9, 17, 44, 200, 7, 12, 13, 14, 15]),
            make(one, two, [12]),
            make([5, 6]),
            make(two, [5]),
        ]
        self.answers = [paligemma_pictured.answer(self.model, each, OUTPUT) for each in self.asked]


@pytest.fixture(scope="module", params=[1, 2])
def paligemma(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PaliGemma:
    return PaliGemma(request.param, tmp_path_factory.mktemp("paligemma"))


@pytest.mark.parametrize("ahead", [0, 1])
def test_prompts_get_the_tokens_of_transformers(paligemma: PaliGemma, ahead: int) -> None:
    runner = open_runner(paligemma.folder, **SIZES)
    facts = runner.facts
    assert facts.whole_prompts and not facts.cuts_prompts and facts.max_num_batched_tokens >= 64
    engine = Engine(runner.launch, facts, paligemma.prompts, chunk=1)
    assert_answers(engine.run(paligemma.asked, OUTPUT, ahead=ahead), paligemma.answers)


def test_tokens_of_a_prompt_see_later_ones(paligemma: PaliGemma) -> None:
    """Otherwise the answers would be others, so the comparisons above show that they do."""
    other = expected(paligemma.model, paligemma.asked[0], OUTPUT, paligemma_pictured.inputs)
    assert other.logprobs != pytest.approx(paligemma.answers[0].logprobs, abs=1e-3)


@pytest.mark.parametrize("newer", [False, True])
def test_other_names_of_tensors_are_read_too(paligemma: PaliGemma, newer: bool, tmp_path: Path) -> None:
    def rename(name: str) -> str:
        plain = name.removeprefix("model.").replace("language_model.model.", "language_model.")
        if newer:
            return f"model.{plain}"
        return plain.replace("language_model.", "language_model.model.")

    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text((paligemma.folder / name).read_text())
    found = load_file(paligemma.folder / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in found.items()}, tmp_path / "model.safetensors")
    runner = open_runner(tmp_path, **SIZES)
    engine = Engine(runner.launch, runner.facts, paligemma.prompts)
    assert_answers(engine.run(paligemma.asked, OUTPUT), paligemma.answers)


def test_steps_too_small_for_a_prompt_and_texts_alone_are_refused(
    paligemma: PaliGemma, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"reads a text in one step: raise the first or lower the second"):
        open_runner(paligemma.folder, **SIZES, max_num_batched_tokens=32)
    with pytest.raises(ConfigError, match="is not served for text alone"):
        open_runner(paligemma.folder, **SIZES, language_model_only=True)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(paligemma.folder / name)
    with pytest.raises(ConfigError, match=r"needs preprocessor_config\.json"):
        open_runner(tmp_path, **SIZES)
