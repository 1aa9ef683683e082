"""Tiny random models of each family that sees pictures give the rows and the tokens of transformers."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from media_files import noise
from opened import open_runner
from pictured import VISION, Engine, Prompts, encoded_by_layers, expected, tower_input, write_pictured
from PIL.Image import Image
from safetensors.torch import load_file, save_file
from shape_files import read_shapes
from torch import Tensor
from video_files import noisy_video

from models.config import read_config
from models.loader import LoadOptions, load_model
from models.media.item import VideoProcessor
from models.towers.model import find_tower
from models.towers.tower import TowerInput
from worker.protocol import Encode

Inputs = dict[str, Any]
OUTPUT = 4
TOWER: dict[str, Any] = VISION


NESTED = ("Idefics3ImageProcessorPil",)
"""Processors to which a list of pictures is that of one prompt."""
TAKEN = {
    "Idefics3ImageProcessorPil": ("pixel_values", "pixel_attention_mask"),
    "GotOcr2ImageProcessorPil": ("pixel_values",),
}
"""What models take of what their processors make, if it is not all of it."""


class Family(NamedTuple):
    architecture: str
    fields: dict[str, Any]
    reference: Any
    """The image processor of transformers, whose settings the checkpoint has."""

    def inputs(self, pictures: list[Image]) -> Inputs:
        kind, options = type(self.reference).__name__, dict[str, Any]()
        if kind == "PixtralImageProcessorPil":
            unit = 14 * self.fields.get("spatial_merge_size", 1)
            options = {"patch_size": {"height": unit, "width": unit}}
        made = self.reference(
            images=[pictures] if kind in NESTED else pictures, return_tensors="pt", **options
        )
        return {name: torch.as_tensor(made[name]) for name in TAKEN.get(kind, made)}


FAMILIES = {
    name: Family(
        each["architecture"], each["config"], getattr(transformers, each["reference"])(**each["settings"])
    )
    for name, each in read_shapes("seen").items()
    if "architecture" in each
}


class Written:
    """A tiny checkpoint of a family, prompts with pictures, and what transformers makes of them."""

    def __init__(self, family: Family, folder: Path) -> None:
        self.family = family
        model: Any = write_pictured(family.architecture, folder, family.fields, family.reference.to_dict())
        self.prompts = prompts = Prompts(folder)
        wide, high, square = noise(100, 40), noise(31, 90), noise(64, 64)
        self.asked = [
            prompts.make([5, 9, 17], wide, [44, 200, 7]),
            prompts.make([5, 9, 17, 44, 200, 7]),
            prompts.make(high, square, [12]),
            prompts.make([5], square, [7, 8], square, wide),
        ]
        self.answers = [expected(model, each, OUTPUT, self._inputs) for each in self.asked]
        with torch.no_grad():
            features = model.get_image_features(**self._inputs([wide, high, square], [])).pooler_output
        self.rows = torch.cat([each.flatten(0, -2) for each in features])
        self.model = model

    def _inputs(self, pictures: list[Image], ids: list[int]) -> Inputs:
        return self.family.inputs(pictures)

    def assert_frames(self, folder: Path) -> None:
        """The tower makes of a video what it makes of each frame as a picture of one tile."""
        tower: Any = find_tower(load_model(LoadOptions(read_config(folder), folder, dtype=torch.float32)))
        processor = self.prompts.processor
        assert isinstance(processor, VideoProcessor)
        video = tower_input(processor.prepare_video(noisy_video(9, 64, 64, 2.0), 3, 1 << 20))
        side = video.pixels.shape[1]
        frames = [
            TowerInput("image", each, (1, 1, 1), video.embeddings // 3) for each in video.pixels.split(side)
        ]
        torch.testing.assert_close(
            torch.cat(encoded_by_layers(tower, [video])), torch.cat(encoded_by_layers(tower, frames))
        )

    def assert_video(self, folder: Path) -> None:
        """The tower makes of a video what transformers makes of it."""
        tower: Any = find_tower(load_model(LoadOptions(read_config(folder), folder, dtype=torch.float32)))
        processor = self.prompts.processor
        assert isinstance(processor, VideoProcessor)
        video = tower_input(processor.prepare_video(noisy_video(9, 64, 64, 2.0), 3, 1 << 20))
        side, settings = video.pixels.shape[1], processor.settings
        normal = (video.pixels / 255 - torch.tensor(settings.image_mean)) / torch.tensor(settings.image_std)
        pixels = normal.view(1, 3, side, side, 3).permute(0, 1, 4, 2, 3)
        with torch.no_grad():
            right = self.model.model.get_video_features(pixels).pooler_output[0]
        [rows] = encoded_by_layers(tower, [video])
        torch.testing.assert_close(rows, right, atol=1e-4, rtol=1e-4)

    def assert_rows(self, folder: Path) -> None:
        """The tower of the checkpoint gives the rows of transformers, together and one by one."""
        tower: Any = find_tower(load_model(LoadOptions(read_config(folder), folder, dtype=torch.float32)))
        items = [as_input(self.prompts.encode(number)) for number in range(3)]
        ours = encoded_by_layers(tower, items)
        assert [len(rows) for rows in ours] == [item.embeddings for item in items]
        worst = (torch.cat(ours) - self.rows).abs().max()
        assert worst <= 1e-4 * max(1.0, float(self.rows.abs().max()))

    def assert_answers(self, folder: Path, chunk: int) -> None:
        runner = open_runner(
            folder, max_num_seqs=4, block_size=4, num_gpu_blocks_override=512, max_model_len=400
        )
        engine = Engine(runner.launch, runner.facts, self.prompts, chunk=chunk)
        answers = engine.run(self.asked, OUTPUT)
        for answer, other in zip(answers, self.answers, strict=True):
            assert answer.tokens == other.tokens
            assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        alone = Engine(runner.launch, runner.facts, self.prompts, chunk=chunk)
        assert alone.run(self.asked[-1:], OUTPUT) == answers[-1:]


def as_input(item: Encode) -> TowerInput:
    pixels = torch.frombuffer(bytearray(item.pixels.data), dtype=torch.uint8)
    return TowerInput(item.kind, pixels.view(item.shape), item.grid, item.embeddings)


@pytest.mark.parametrize("name", FAMILIES)
def test_pictures_and_texts_give_what_transformers_gives(name: str, tmp_path: Path) -> None:
    written = Written(FAMILIES[name], tmp_path)
    if name in ("internvl", "smolvlm"):
        written.assert_frames(tmp_path)
    if name == "onevision":
        written.assert_video(tmp_path)
    written.assert_rows(tmp_path)
    written.assert_answers(tmp_path, 7)
    written.assert_answers(tmp_path, 512)


def rename(folder: Path, *names: tuple[str, Any]) -> None:
    """Give tensors the names that patterns make of theirs."""
    found = load_file(folder / "model.safetensors")
    renamed: dict[str, Tensor] = {}
    for name, tensor in found.items():
        for pattern, other in names:
            name = re.sub(pattern, other, name)
        renamed[name] = tensor
    save_file(renamed, folder / "model.safetensors")


@pytest.mark.parametrize("name", ["mistral3", "llava next", "onevision", "internvl"])
def test_other_names_of_tensors_are_read_too(name: str, tmp_path: Path) -> None:
    written = Written(FAMILIES[name], tmp_path)
    rename(
        tmp_path,
        (r"^language_model\.model", "model.language_model"),
        (r"^language_model\.lm_head", "lm_head"),
        (r"^(vision_tower|multi_modal_projector|image_newline)", r"model.\1"),
    )
    written.assert_rows(tmp_path)
    written.assert_answers(tmp_path, 512)


def publish(folder: Path, reference: Any) -> None:
    """Write a checkpoint of InternVL's under the names of its authors."""
    rename(
        folder,
        (r"^vision_tower", "vision_model"),
        (r"(?<=embeddings\.)(cls_token|patch_embeddings\.projection|position_embedding)s?", _as_published),
        (r"encoder\.layer\.", "encoder.layers."),
        (r"layernorm_before", "norm1"),
        (r"layernorm_after", "norm2"),
        (r"lambda_(\d)", r"ls\1"),
        (r"attention\.projection_layer", "attn.proj"),
        (r"multi_modal_projector\.layer_norm", "mlp1.0"),
        (r"multi_modal_projector\.linear_1", "mlp1.1"),
        (r"multi_modal_projector\.linear_2", "mlp1.3"),
    )
    found = load_file(folder / "model.safetensors")
    for number in range(TOWER["num_hidden_layers"]):
        for kind in ("weight", "bias"):
            parts = [f"vision_model.encoder.layers.{number}.attention.{part}_proj.{kind}" for part in "qkv"]
            if parts[0] in found:
                joined = torch.cat([found.pop(part) for part in parts])
                found[f"vision_model.encoder.layers.{number}.attn.qkv.{kind}"] = joined
    save_file(found, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(published_config(config, reference.max_patches)))
    means = {"image_mean": reference.image_mean, "image_std": reference.image_std}
    settings = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 448, **means}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def published_config(config: dict[str, Any], most: int) -> dict[str, Any]:
    vision = config["vision_config"]
    kept = {key: value for key, value in vision.items() if key not in ("attention_bias", "use_qk_norm")}
    names = {"qkv_bias": vision["attention_bias"], "qk_normalization": False}
    sizes = {"image_size": vision["image_size"][0], "patch_size": 14}
    return {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "llm_config": config["text_config"],
        "vision_config": {**kept, **names, **sizes},
        "select_layer": config["vision_feature_layer"],
        "max_dynamic_patch": most,
        "ps_version": "v2",
    }


def _as_published(found: re.Match[str]) -> str:
    return {"cls_token": "class_embedding", "patch_embeddings.projection": "patch_embedding"}.get(
        found[1], "position_embedding"
    )


@pytest.mark.parametrize("name", ["internvl", "internvl of Qwen 3"])
def test_internvl_is_read_as_its_authors_published_it(name: str, tmp_path: Path) -> None:
    written = Written(FAMILIES[name], tmp_path)
    publish(tmp_path, written.family.reference)
    written.assert_rows(tmp_path)
    written.assert_answers(tmp_path, 512)
    again = Prompts(tmp_path)
    places = [again.make(*[each.pictures[0]]).media for each in written.asked if each.pictures]
    assert [place.runs for (place,) in places] == [
        each.media[0].runs for each in written.asked if each.pictures
    ]
