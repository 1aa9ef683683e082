"""Tiny random models that read documents give the rows and the tokens of transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from media_files import media_files, noise
from opened import open_runner
from pictured import TEXT, Engine, Prompts, assert_answers, expected, tower_input, write_pictured
from PIL import ImageOps
from PIL.Image import Image
from safetensors.torch import load_file, save_file
from shape_files import read_shapes
from torch import Tensor
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import DeepseekOcr2ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from models.config import read_config
from models.loader import LoadOptions, load_model
from models.media.files import MediaFiles
from models.media.item import Picture, Prepared
from models.media.registry import make_processor
from models.plain_files import ConfigError
from models.towers.model import find_tower
from models.towers.tower import finish

OUTPUT = 3
TOWER: dict[str, object] = {"vision_config": {}}
SAM, EXPERTS = (read_shapes("pictured")[f"document {name}"] for name in ("tower", "text"))
WIDE, HIGH, LARGE = noise(100, 40), noise(31, 90), noise(800, 500)
Inputs = dict[str, Any]


def check_rows(folder: Path, prompts: Prompts, wanted: Tensor) -> None:
    """The tower gives these rows for the items of prompts, together and one by one."""
    tower: Any = find_tower(load_model(LoadOptions(read_config(folder), folder, dtype=torch.float32)))
    items = [tower_input(prompts.items[number]) for number in sorted(prompts.items)]
    together = finish(tower.encode(items))
    assert [len(rows) for rows in together] == [item.embeddings for item in items]
    ours = torch.cat(together)
    assert (ours - wanted).abs().max() <= 1e-4 * max(1.0, float(wanted.abs().max()))
    for item, rows in zip(items, together, strict=True):
        assert torch.equal(finish(tower.encode([item]))[0], rows)


def check_answers(
    folder: Path,
    prompts: Prompts,
    model: Any,
    pictures: list[Image],
    inputs: Callable[..., Inputs],
    *,
    chunk: int,
) -> None:
    asked = [prompts.make([5, 9, 17], *pictures[:1], [44, 200, 7]), prompts.make([5], *pictures[1:], [12])]
    right = [expected(model, each, OUTPUT, inputs) for each in asked]
    length = max(len(each.tokens) for each in asked) + 2 * OUTPUT
    runner = open_runner(
        folder, max_num_seqs=2, block_size=4, num_gpu_blocks_override=1024, max_model_len=length
    )
    assert_answers(Engine(runner.launch, runner.facts, prompts, chunk=chunk).run(asked, OUTPUT), right)


RENAMED = {
    "model.sam_model.": "model.vision_tower.sam_encoder.",
    ".blocks.": ".layers.",
    ".norm1.": ".layer_norm1.",
    ".norm2.": ".layer_norm2.",
    "patch_embed.proj.": "patch_embed.projection.",
    "neck.0.": "neck.conv1.",
    "neck.1.": "neck.layer_norm1.",
    "neck.2.": "neck.conv2.",
    "neck.3.": "neck.layer_norm2.",
    ".net_2.": ".proj.conv1.",
    ".net_3.": ".proj.conv2.",
    "qwen2_model.model.model.": "vision_tower.vision_encoder.",
    "qwen2_model.query_768.": "vision_tower.query_768_resolution.",
    "qwen2_model.query_1024.": "vision_tower.query_1024_resolution.",
    "projector.layers.": "multi_modal_projector.",
    "view_seperator": "view_separator",
    "model.embed_tokens.": "model.language_model.embed_tokens.",
    "model.layers.": "model.language_model.layers.",
    "model.norm.": "model.language_model.norm.",
}


def as_in_transformers(name: str) -> str:
    """The name that transformers' class has for a tensor under its published name."""
    for published, own in RENAMED.items():
        name = name.replace(published, own)
    return name


def test_version_2_gives_what_transformers_gives(tmp_path: Path) -> None:
    encoder = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    }
    fields = {
        "text_config": EXPERTS,
        "vision_config": {"sam_config": {**SAM, "downsample_channels": [16, 32]}, "encoder_config": encoder},
        "image_token_id": 310,
    }
    reference = DeepseekOcr2ImageProcessorPil(max_patches=3)
    model: Any = write_pictured(
        "DeepseekOcr2ForConditionalGeneration", tmp_path, fields, reference.to_dict(), scale=0.2
    )

    def inputs(pictures: list[Image], ids: list[int]) -> Inputs:
        return dict(reference(images=pictures, return_tensors="pt"))

    prompts = Prompts(tmp_path)
    check_answers(tmp_path, prompts, model, [WIDE, LARGE], inputs, chunk=300)
    with torch.no_grad():
        wanted = model.get_image_features(**inputs([WIDE, LARGE], [])).pooler_output
    check_rows(tmp_path, prompts, torch.cat([*wanted]))
    config = json.loads((tmp_path / "config.json").read_text())
    text = {name: value for name, value in config.pop("text_config").items() if name != "model_type"}
    own = {"architectures": ["DeepseekOCR2ForCausalLM"], "model_type": "deepseek_vl_v2"}
    (tmp_path / "config.json").write_text(json.dumps({**config, **own, "language_config": text}))
    check_rows(tmp_path, prompts, torch.cat([*wanted]))
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "text_config": model.config.text_config.to_dict()})
    )
    tensors = load_file(tmp_path / "model.safetensors")
    assert "model.view_seperator" in tensors  # transformers writes the names that DeepSeek gave
    save_file(
        {as_in_transformers(name): each for name, each in tensors.items()}, tmp_path / "model.safetensors"
    )
    check_rows(tmp_path, prompts, torch.cat([*wanted]))


def test_got_ocr2_gives_what_transformers_gives(tmp_path: Path) -> None:
    square = {"height": 256, "width": 256}
    reference = GotOcr2ImageProcessorPil(size=square)
    fields = {
        "text_config": {**TEXT, "model_type": "qwen2", "tie_word_embeddings": True},
        "vision_config": {**SAM, "image_size": 256},
        "image_token_index": 310,
    }
    model: Any = write_pictured("GotOcr2ForConditionalGeneration", tmp_path, fields, reference.to_dict())

    def inputs(pictures: list[Image], ids: list[int]) -> Inputs:
        return {"pixel_values": reference(images=pictures, return_tensors="pt").pixel_values}

    prompts = Prompts(tmp_path)
    check_answers(tmp_path, prompts, model, [WIDE, HIGH], inputs, chunk=7)
    with torch.no_grad():
        wanted = model.get_image_features(**inputs([WIDE, HIGH], [])).pooler_output
    check_rows(tmp_path, prompts, wanted.flatten(0, 1))


TILES = {"tile_size": 64, "size": {"height": 128, "width": 128}, "max_patches": 6}


def published(folder: Path, config: dict[str, Any]) -> None:
    """Write the files of a version 1 as its authors have them."""
    text = {name: value for name, value in config["text_config"].items() if name != "model_type"}
    sizes = {"heads": 2, "layers": 3, "width": 24, "global_attn_indexes": [1]}
    clip = {"heads": 4, "image_size": 28, "layers": 2, "patch_size": 14, "width": 32}
    width = {"clip-l-14-224": clip, "sam_vit_b": {**sizes, "downsample_channels": [16, 32]}}
    whole = {
        "architectures": ["DeepseekOCRForCausalLM"],
        "model_type": "deepseek_vl_v2",
        "language_config": {**text, "use_mla": False, "kv_lora_rank": None, "qk_rope_head_dim": 0},
        "vision_config": {"image_size": 128, "width": width},
        "image_token_id": 310,
    }
    (folder / "config.json").write_text(json.dumps(whole))
    (folder / "preprocessor_config.json").unlink()
    half = [0.5] * 3
    settings = {"processor_class": "DeepseekVLV2Processor", "image_mean": half, "image_std": half, **TILES}
    (folder / "processor_config.json").write_text(json.dumps(settings))


def unlimited_inputs(prompts: Prompts, numbers: list[int]) -> Inputs:
    """What transformers' Unlimited-OCR takes for items, by the pixels of ours, which other tests compare."""
    pages: list[Tensor] = []
    tiles: list[Tensor] = []
    grids: list[list[int]] = []
    for number in numbers:
        item = prompts.items[number]
        pixels = (torch.from_numpy(np.array(item.pixels)).float() / 255 - 0.5) / 0.5
        pages.append(pixels[-3 * 128**2 :].view(128, 128, 3).permute(2, 0, 1))
        tiles += pixels[: -3 * 128**2].view(-1, 64, 64, 3).permute(0, 3, 1, 2)
        rows, height, width = item.grid
        grids.append([width * rows // height, rows] if len(pixels) > 3 * 128**2 else [1, 1])
    counts = [columns * rows if columns * rows > 1 else 0 for columns, rows in grids]
    local = {"pixel_values_local": torch.stack(tiles)} if tiles else {}
    return {"pixel_values": torch.stack(pages), **local, "num_local_patches": counts, "patches_grid": grids}


def test_version_1_gives_what_transformers_gives_for_unlimited_ocr(tmp_path: Path) -> None:
    """transformers lacks version 1. Unlimited-OCR has its tower and, where a window holds all, its text."""
    sam = {**SAM, "image_size": 128, "downsample_channels": [16, 32]}
    clip = {
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
    }
    fields = {
        "text_config": {**EXPERTS, "sliding_window": 4096, "tie_word_embeddings": False},
        "vision_config": {"sam_config": sam, "encoder_config": clip},
        "image_token_id": 310,
        "tie_word_embeddings": False,
    }
    model: Any = write_pictured("UnlimitedOcrForConditionalGeneration", tmp_path, fields, {}, scale=0.2)
    published(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    prompts = Prompts(tmp_path)
    numbers = {id(HIGH): 1, id(WIDE): 0, id(LARGE): 2}
    small = noise(50, 60)
    numbers[id(small)] = 3

    def inputs(pictures: list[Image], ids: list[int]) -> Inputs:
        return unlimited_inputs(prompts, [numbers[id(each)] for each in pictures])

    check_answers(tmp_path, prompts, model, [WIDE, HIGH, LARGE, small], inputs, chunk=11)
    with torch.no_grad():
        wanted = model.get_image_features(**inputs([WIDE, HIGH, LARGE, small], [])).pooler_output
    check_rows(tmp_path, prompts, torch.cat([*wanted]))


def views(item: Prepared, whole: int) -> list[np.ndarray]:
    """The tiles of an item together, and the whole page."""
    pixels = np.frombuffer(item.pixels, np.uint8)
    rows, height, _ = item.grid
    tiles, page = np.split(pixels, [len(pixels) - 3 * whole**2])
    side = height // rows * 16
    return [tiles.reshape(-1, side, side, 3) if len(tiles) else tiles, page.reshape(whole, whole, 3)]


@pytest.mark.parametrize(
    "size", [(1, 1), (7, 200), (335, 337), (767, 768), (769, 5), (1023, 767), (1600, 1200)]
)
def test_pixels_are_those_of_the_reference(size: tuple[int, int]) -> None:
    reference = DeepseekOcr2ImageProcessorPil(do_rescale=False, do_normalize=False)
    settings = {**reference.to_dict(), "do_rescale": True, "do_normalize": True}
    processor = make_processor(media_files("DeepseekOcr2ForConditionalGeneration", TOWER, settings))
    picture = noise(*size)
    item = processor.prepare(picture)
    tiles, page = views(item, 1024)
    theirs = reference(images=picture, return_tensors="np")
    assert np.array_equal(page, theirs["pixel_values"][0].transpose(1, 2, 0))
    if "pixel_values_local" in theirs:
        assert np.array_equal(tiles, np.asarray(theirs["pixel_values_local"]).transpose(0, 2, 3, 1))
    assert item.embeddings == 257 + 144 * int(theirs["num_local_patches"][0])
    assert processor.layout(item).tokens == [128_815] * item.embeddings


@pytest.mark.parametrize("size", [(1, 1), (7, 200), (335, 337), (640, 641), (1023, 767), (1600, 1201)])
def test_pages_of_version_1_lie_as_pillow_pads_them(size: tuple[int, int]) -> None:
    processor = make_processor(MediaFiles("DeepseekOCRForCausalLM", TOWER, {}))
    picture: Picture = noise(*size)
    item = processor.prepare(picture)
    tiles, page = views(item, 1024)
    assert np.array_equal(page, np.asarray(ImageOps.pad(picture, (1024, 1024), color=(127, 127, 127))))
    rows, height, width = item.grid
    columns = width * rows // height
    lines = rows * 10 * (columns * 10 + 1) if len(tiles) else 0
    assert item.embeddings == lines + 16 * 17 + 1
    whole = {"crop_to_patches": False, "tile_size": 640}
    small = make_processor(MediaFiles("DeepseekOCRForCausalLM", TOWER, whole)).prepare(picture)
    assert (small.embeddings, small.grid) == (111, (1, 40, 40))
    assert np.array_equal(views(small, 640)[1], np.asarray(picture.resize((640, 640), 3)))


def test_views_without_queries_are_refused() -> None:
    for tile in (640, 700):
        with pytest.raises(ConfigError, match=f"tiles of {tile} are not served"):
            make_processor(MediaFiles("DeepseekOcr2ForConditionalGeneration", TOWER, {"tile_size": tile}))
