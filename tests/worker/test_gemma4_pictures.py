"""Gemma 4 on tiny texts and towers: pictures of any shape, which some of its models see both ways."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from media_files import noise
from opened import open_runner
from pictured import TEXT, Engine, Prompts, assert_answers, expected, tower_input, write_pictured
from PIL.Image import Image
from ranks import Layout, Ranks, RanksOfTests
from shape_files import read_shapes
from sizes import worker_config
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4_unified import modeling_gemma4_unified as gemma4_unified

from models.config import ConfigError, read_config
from models.loader import LoadOptions, load_model
from models.media.registry import find_media, make_processor

SETTINGS, LARGE, SMALL, TOWER = (
    read_shapes("pictured")[f"gemma4 {name}"] for name in ("settings", "large", "small", "tower")
)
SOFT = 317
OUTPUT = 4
SIZES: dict[str, Any] = {
    "max_num_seqs": 6,
    "block_size": 4,
    "num_gpu_blocks_override": 900,
    "max_model_len": 320,
    "cpu_threads": 1,
}


class Gemma4:
    def __init__(
        self, folder: Path, text: dict[str, Any], tower: dict[str, Any], family: str = "Gemma4"
    ) -> None:
        self.folder, self.family = folder, family
        settings = {**SETTINGS, "image_processor_type": f"{family}ImageProcessor"}
        fields = {
            "text_config": {
                **TEXT,
                "global_head_dim": 32,
                "sliding_window": 30,
                "final_logit_softcapping": 2.0,
                **text,
            },
            "vision_config": {**TOWER, **tower},
            "audio_config": None,
            "image_token_id": SOFT,
            "boi_token_id": 311,
            "eoi_token_id": 312,
            "video_token_id": 313,
            "audio_token_id": 314,
        }
        self.model = write_pictured(f"{family}ForConditionalGeneration", folder, fields, settings)
        if tower.get("use_clipped_linears"):
            self._bound()
        self.prompts = Prompts(folder)
        one, two, strip = noise(40, 28), noise(31, 90), noise(400, 3)
        make = self.prompts.make
        self.asked = [
            make([5, 9, 17, 4, 8, 2, 33, 71], one, [44, 200, 7]),
            make([5, 9, 17, 44, 200, 7, 12, 13, 14, 15]),
            make(two, [3], one, [12]),
            make([5, 6], strip, [80, 81, 82, 83], one),
        ]
        self.answers = [expected(self.model, each, OUTPUT, self.inputs) for each in self.asked]

    def _bound(self) -> None:
        """Give the matrices bounds that are met."""
        state = self.model.state_dict()
        for name, value in state.items():
            if name.endswith(("_min", "_max")):
                value.fill_(-0.8 if name.endswith("_min") else 0.7)
        self.model.save_pretrained(self.folder)  # pyright: ignore[reportCallIssue]

    def inputs(self, pictures: list[Image], ids: list[int]) -> dict[str, Any]:
        whole = {"patch_size": 8, "pooling_kernel_size": 1} if self.family == "Gemma4Unified" else {}
        made = Gemma4ImageProcessorPil(**{**SETTINGS, **whole})(pictures, return_tensors="pt")  # pyright: ignore[reportArgumentType]
        types = (torch.tensor([ids]) == SOFT).long()
        masks = {"attention_mask": self.masks(types)} if self.family == "Gemma4Unified" else {}
        return {
            "pixel_values": made["pixel_values"],
            "image_position_ids": made["image_position_ids"],
            "mm_token_type_ids": types,
            **masks,
        }

    def masks(self, types: torch.Tensor) -> dict[str, torch.Tensor]:
        """The masks with which transformers' `generate` computes: its `forward` alone makes others."""
        given = {"attention_mask": None, "cache": None, "position_ids": None}
        embeds = torch.zeros(*types.shape, 32)
        blocks = gemma4_unified.get_block_sequence_ids_for_mask(types, embeds.device)
        config: Any = self.model.config
        return gemma4_unified.create_masks_for_vision_model(
            config.text_config, embeds, block_sequence_ids=blocks, **given
        )


@pytest.fixture(scope="module", params=["large", "small", "unified"])
def gemma(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Gemma4:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "large":
        return Gemma4(folder, LARGE, {"standardize": True, "num_key_value_heads": 4})
    if request.param == "unified":
        text = {**LARGE, "attention_k_eq_v": False}
        sizes = {"mm_embed_dim": 32, "mm_posemb_size": 75, "output_proj_dims": 32}
        return Gemma4(folder, text, sizes, "Gemma4Unified")
    return Gemma4(folder, SMALL, {"use_clipped_linears": True})


@pytest.mark.parametrize("chunk", [7, 512])
def test_prompts_with_pictures_get_the_tokens_of_transformers(gemma: Gemma4, chunk: int) -> None:
    runner = open_runner(gemma.folder, **SIZES)
    assert runner.facts.whole_media == ("small" not in gemma.folder.name)
    engine = Engine(runner.launch, runner.facts, gemma.prompts, chunk=chunk)
    assert_answers(engine.run(gemma.asked, OUTPUT, ahead=chunk % 2), gemma.answers)


def test_stages_give_the_tokens_of_one(gemma: Gemma4, ranks: Ranks) -> None:
    """What tokens' vectors for layers are made of goes on to the second stage."""
    config = worker_config(folder=str(gemma.folder), model=read_config(gemma.folder), **SIZES)
    executor = RanksOfTests(ranks, Layout(1, 2), config)
    engine = Engine(executor.submit, executor.start(), gemma.prompts, chunk=100)
    assert_answers(engine.run(gemma.asked, OUTPUT), gemma.answers)
    executor.stop()


def test_an_item_has_the_same_bits_alone_and_beside_others(gemma: Gemma4) -> None:
    model: Any = load_model(LoadOptions(read_config(gemma.folder), gemma.folder, dtype=torch.float32))
    items = [tower_input(item) for item in gemma.prompts.items.values()]
    for item, rows in zip(items, model.encode(items), strict=True):
        assert rows.shape == (item.embeddings, 32)
        assert torch.equal(model.encode([item])[0], rows)


@pytest.mark.parametrize(
    "size", [(1, 1), (300, 200), (64, 64), (33, 65), (1000, 1), (3, 700), (1, 3000), (41, 17), (800, 799)]
)
def test_pixels_and_counts_are_those_of_transformers(gemma: Gemma4, size: tuple[int, int]) -> None:
    picture = noise(*size)
    made = Gemma4ImageProcessorPil(**SETTINGS)(picture, return_tensors="np")
    item = gemma.prompts.processor.prepare(picture)
    assert item.embeddings == int(made["num_soft_tokens_per_image"][0])
    _, down, across = item.grid
    pixels = np.asarray(item.pixels).reshape(item.shape).astype(np.float64) / 255
    patches = pixels.reshape(down, 4, across, 4, 3).transpose(0, 2, 1, 3, 4).reshape(down * across, -1)
    theirs = made["pixel_values"][0][: down * across]
    assert np.array_equal(np.rint(patches * 255), np.rint(theirs * 255))


@pytest.mark.parametrize(
    ("changed", "why"),
    [({"do_normalize": True}, "do_normalize"), ({"patch_size": 8}, "not those of the tower")],
)
def test_settings_that_are_not_served_are_refused(
    gemma: Gemma4, tmp_path: Path, changed: dict[str, Any], why: str
) -> None:
    (tmp_path / "config.json").write_text((gemma.folder / "config.json").read_text())
    settings = json.loads((gemma.folder / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**settings, **changed}))
    files = find_media(tmp_path)
    assert files is not None
    with pytest.raises(ConfigError, match=why):
        make_processor(files)
