"""LLaVA on a tiny text and tower gives the tokens of transformers, however its steps are cut."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from media_files import noise
from msgspec.structs import replace
from opened import feature_of, open_runner
from pictured import (
    Engine,
    Prompts,
    assert_answers,
    expected,
    write_pictured,
)
from pictured_chat import LLAVA, SETTINGS
from PIL.Image import Image
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CLIPImageProcessorPil, LlamaConfig

from models.config import ConfigError, read_config
from models.loader import LoadOptions, load_model
from models.parallel.parallel import Parallel
from models.towers.llava import LlavaTower
from models.towers.model import find_tower
from worker.capacity import CacheBudget
from worker.devices.cpu import Cpu
from worker.features.media.media import Media
from worker.features.media.media_memory import MOST_PATCHES, media_bytes, row_bytes
from worker.protocol import NewSeq, Sampling, SeqStep, StepInput, StepOutput
from worker.runner import Runner

OUTPUT = 5
ROW = 32 * 4
"""The bytes of an embedding."""
SIZES: dict[str, Any] = {
    "max_num_seqs": 6,
    "block_size": 4,
    "num_gpu_blocks_override": 256,
    "max_model_len": 64,
    "cpu_threads": 1,
}


class Llava:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model: nn.Module = write_pictured("LlavaForConditionalGeneration", folder, LLAVA, SETTINGS)
        self.prompts = Prompts(folder)
        one, two = noise(40, 28), noise(31, 90)
        make = self.prompts.make
        self.asked = [
            make([5, 9, 17], one, [44, 200, 7]),
            make([5, 9, 17, 44, 200, 7]),
            make(one, two, [12]),
            make([5, 6], two, [80, 81, 82, 83], one),
            make([5], one, [7, 8], one, one, [3, 9]),
        ]
        self.answers = [expected(self.model, each, OUTPUT, self.inputs) for each in self.asked]

    def inputs(self, pictures: list[Image], ids: list[int]) -> dict[str, Any]:
        processor = CLIPImageProcessorPil(**SETTINGS)
        return {"pixel_values": processor(pictures, return_tensors="pt")["pixel_values"]}


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Llava:
    return Llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def runner(llava: Llava) -> Runner:
    return open_runner(llava.folder, **SIZES)


def test_steps_behind_a_picture_are_replayed(llava: Llava, runner: Runner) -> None:
    replays: Any = runner._compute.forward  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    with mock.patch.object(replays, "_forward", wraps=replays._forward) as forward:
        Engine(runner.launch, runner.facts, llava.prompts).run(llava.asked[:1], OUTPUT)
    assert forward.call_count == 1, "the first step, which reads the picture"


def test_a_first_stage_without_layers_that_pictures_add_to_is_refused(
    llava: Llava, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlavaTower, "levels", 2)
    config = read_config(llava.folder)
    for stage in (0, 2):
        cut = Parallel(stage=stage, stages=3)
        with pytest.raises(ConfigError, match="first stage would have 1 layers, and pictures add"):
            load_model(LoadOptions(config, llava.folder, dtype=torch.float32, parallel=cut))


def as_published(name: str) -> str:
    """The name that a tensor has in the files of 2023."""
    name = name.removeprefix("model.")
    name = name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    return (
        name
        if "." not in name or name.startswith(("vision", "multi", "language"))
        else f"language_model.{name}"
    )


def test_published_names_are_read(llava: Llava, tmp_path: Path) -> None:
    tensors = load_file(llava.folder / "model.safetensors")
    assert any(name.startswith("language_model.model.") for name in tensors)
    save_file(
        {as_published(name): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors"
    )
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(llava.folder / name, tmp_path)
    runner = open_runner(tmp_path, **SIZES)
    engine = Engine(runner.launch, runner.facts, llava.prompts)
    assert_answers(engine.run(llava.asked[:1], OUTPUT), llava.answers[:1])


def test_without_its_tower_text_alone_is_served(
    llava: Llava, runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        alone = open_runner(llava.folder, language_model_only=True, **SIZES)
    assert any("text alone is served" in record.getMessage() for record in caplog.records)
    assert alone.facts.most_embeddings == 0 < runner.facts.most_embeddings
    assert alone.facts.weight_bytes < runner.facts.weight_bytes
    text = llava.asked[1:2]
    expected = Engine(runner.launch, runner.facts, llava.prompts).run(text, OUTPUT)
    assert Engine(alone.launch, alone.facts, llava.prompts).run(text, OUTPUT) == expected


def test_what_contradicts_the_items_that_are_held_is_refused(llava: Llava) -> None:
    runner = open_runner(llava.folder, **SIZES)
    prompt = llava.asked[0]
    new = NewSeq(0, prompt.tokens, len(prompt.tokens), Sampling(max_tokens=1, temperature=0), prompt.media)
    blocks = list(range(-(-len(prompt.tokens) // 4)))
    row = SeqStep(0, 0, len(prompt.tokens), blocks, samples=True)
    item = llava.prompts.encode(prompt.media[0].number)

    def launch(fresh: bool = True, **given: Any) -> StepOutput:
        return runner.launch(StepInput(1, **{"new": [new], "seqs": [row], "fresh": fresh, **given})).result()

    with pytest.raises(ValueError, match="of which there are 0"):
        launch()
    first = launch(encode=[item]).tokens
    with pytest.raises(ValueError, match=r"forgets items \[9\]"):
        launch(fresh=False, forget=[9])
    assert launch(encode=[item]).tokens == first, "behind a failed step it is not there any more"
    with pytest.raises(ValueError, match=r"brings \[0\] again"):
        launch(encode=[item], fresh=False)
    assert launch(encode=[item]).tokens == launch(fresh=False).tokens == first
    with pytest.raises(ValueError, match="have room"):
        launch(encode=[replace(item, number=2, embeddings=1 << 30)])


def test_layers_of_an_item_may_be_computed_in_several_steps(llava: Llava) -> None:
    runner, prompt, beside = open_runner(llava.folder, **SIZES), llava.asked[0], llava.asked[1]
    assert runner.facts.tower_layers == 2, "the last one's result is not used"
    sampling = Sampling(max_tokens=1, temperature=0)
    blocks = list(range(-(-len(prompt.tokens) // 4)))
    pictured = NewSeq(0, prompt.tokens, len(prompt.tokens), sampling, prompt.media)
    row = SeqStep(0, 0, len(prompt.tokens), blocks, samples=True)
    text = NewSeq(1, beside.tokens, len(beside.tokens), sampling)
    other = SeqStep(1, 0, len(beside.tokens), [10, 11], samples=True)
    item = llava.prompts.encode(prompt.media[0].number)

    def launch(**given: Any) -> list[int]:
        step = StepInput(1, **{"new": [text], "seqs": [other], **given})
        return runner.launch(step).result().tokens

    right = launch(new=[pictured], seqs=[row], encode=[item], fresh=True)
    alone = launch()
    for parts in ((1, 1), (2,), (1, 5)):
        first, *others = [{item.number: count} for count in parts]
        assert launch(forget=[item.number], encode=[item], partly=first) == alone
        for partly in others:
            assert launch(partly=partly) == alone
        assert launch(new=[pictured], seqs=[row]) == right
    launch(forget=[item.number], encode=[item], partly={item.number: 1})
    with pytest.raises(ValueError, match="of which there are 0"):
        launch(new=[pictured], seqs=[row])
    launch(fresh=True, encode=[item], partly={item.number: 1})
    assert launch(forget=[item.number]) == alone


def test_memory_is_known_from_shapes(llava: Llava, runner: Runner) -> None:
    model = runner._model  # pyright: ignore[reportPrivateUsage]
    tower, config = find_tower(model), read_config(llava.folder)
    assert tower is not None
    few, more = (media_bytes(tower, config, most, torch.float32) for most in (100, 300))
    assert more - few == 200 * row_bytes(tower, config, torch.float32) == 200 * ROW
    assert few > MOST_PATCHES * 3 * 32 * 4, "queries, keys and values of all patches"


@pytest.mark.parametrize("rows", [None, 1000, 0])
def test_a_part_of_the_memory_for_caches_keeps_embeddings(llava: Llava, rows: int | None) -> None:
    memory = 200 << 10
    budget = CacheBudget(memory, "--of-this-test", 1 << 20)
    asked = None if rows is None else rows * ROW / (1 << 30)
    sizes = {"block_size": 4, "max_model_len": 64, "mm_encoder_cache_gb": asked}
    with mock.patch.object(Cpu, "cache_budget", return_value=budget):
        facts = open_runner(llava.folder, **sizes).facts
    kept = memory // 8 // ROW if rows is None else rows
    block = facts.kv_bytes // facts.num_blocks
    assert facts.kept_embeddings == kept and facts.held_embeddings == facts.most_embeddings + kept
    assert facts.num_blocks == (memory - kept * ROW) // block


def test_embeddings_for_which_there_is_no_memory_are_refused(llava: Llava) -> None:
    with pytest.raises(ValueError, match=r"--mm-encoder-cache-gb asks for 1e\+06 GiB"):
        open_runner(llava.folder, **SIZES, mm_encoder_cache_gb=1e6)


def test_the_smallest_picture_is_encoded_at_warm_up(llava: Llava, runner: Runner) -> None:
    media = feature_of(runner, Media)
    with mock.patch.object(find_tower(runner._model), "encode") as encode:  # pyright: ignore[reportPrivateUsage]
        encode.return_value = iter(())
        media._steps.warm_up(llava.folder)  # pyright: ignore[reportPrivateUsage]
    ((items,), _) = encode.call_args
    assert [(item.pixels.shape, item.grid, item.embeddings) for item in items] == [
        ((28, 28, 3), (1, 2, 2), 4)
    ]


def test_what_published_files_leave_out_has_the_values_of_transformers(tmp_path: Path) -> None:
    text = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
    whole = {
        "architectures": ["LlavaForConditionalGeneration"],
        "torch_dtype": "float16",
        "text_config": text,
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = read_config(tmp_path)
    config.require()
    theirs = LlamaConfig(**text)
    assert (config.hidden_size, config.num_layers) == (theirs.hidden_size, theirs.num_hidden_layers)
    assert (config.num_heads, config.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert config.raw["intermediate_size"] == theirs.intermediate_size
    assert (config.vocab_size, config.max_len) == (32064, 4096)
