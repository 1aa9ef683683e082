"""Pixels and counts of tokens beside transformers' image processors on Pillow, bit for bit."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from media_files import TOWER, media_files, noise, tower
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from models.media.item import MediaError, Picture, Prepared, Processor
from models.media.registry import make_processor

SIZES = [(1, 1), (1, 7), (27, 28), (29, 31), (57, 56), (200, 1), (335, 337), (640, 480), (1023, 767)]
SIZES += [(3000, 20), (20, 3000), (1600, 1200)]

QWEN3_TOWER = {**TOWER, "patch_size": 16}
HALF = [0.5, 0.5, 0.5]


class Case(NamedTuple):
    architecture: str
    config: dict[str, Any]
    reference: Any


CASES = {
    "qwen2": Case(
        "Qwen2VLForConditionalGeneration",
        {"image_token_id": 7, "vision_config": TOWER},
        Qwen2VLImageProcessorPil(min_pixels=3136, max_pixels=200_704),
    ),
    "qwen3": Case(
        "Qwen3VLForConditionalGeneration",
        {"image_token_id": 7, "vision_config": QWEN3_TOWER},
        Qwen2VLImageProcessorPil(
            patch_size=16,
            image_mean=HALF,
            image_std=HALF,
            size={"shortest_edge": 65_536, "longest_edge": 500_000},
        ),
    ),
    "clip": Case("CLIPModel", tower("clip"), CLIPImageProcessorPil()),
    "llava": Case(
        "LlavaForConditionalGeneration",
        tower("clip", image_size=336, patch_size=14),
        CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}),
    ),
    "odd crop": Case(
        "LlavaForConditionalGeneration",
        tower("clip", image_size=57, patch_size=14),
        LlavaImageProcessorPil(size={"height": 40, "width": 71}, crop_size={"height": 57, "width": 57}),
    ),
    "siglip": Case("SiglipModel", tower("siglip"), SiglipImageProcessorPil()),
    "gemma3": Case(
        "Gemma3ForConditionalGeneration",
        tower("siglip", image_size=896, patch_size=14),
        Gemma3ImageProcessorPil(size={"height": 896, "width": 896}),
    ),
}


def processor_of(case: Case) -> Processor:
    return make_processor(media_files(case.architecture, case.config, case.reference))


def normalised(item: Prepared, processor: Processor) -> np.ndarray:
    """What a tower makes of an item first: float32 [3, H, W]."""
    settings = processor.settings
    pixels = np.frombuffer(item.pixels, np.uint8).reshape(item.shape)
    scaled = (pixels.astype(np.float64) * settings.rescale_factor).astype(np.float32)
    mean, std = np.float32(settings.image_mean), np.float32(settings.image_std)
    return ((scaled - mean) / std).transpose(2, 0, 1)


@pytest.mark.parametrize("name", CASES)
def test_pixels_are_those_of_the_reference(name: str) -> None:
    case = CASES[name]
    processor = processor_of(case)
    for size in SIZES:
        picture = noise(*size)
        ours = processor.prepare(picture)
        theirs = case.reference(images=picture, return_tensors="np")
        pixels = normalised(ours, processor)
        if "image_grid_thw" in theirs:
            patch = case.reference.patch_size
            pixels, *_ = case.reference.patchify(pixels, patch, 2, 2)
            assert ours.grid == tuple(theirs["image_grid_thw"][0])
            assert ours.embeddings * 4 == len(pixels)
            assert np.array_equal(pixels, theirs["pixel_values"])
        else:
            assert np.array_equal(pixels, theirs["pixel_values"][0])


class Sized:
    """A picture without pixels."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = self.size = width, height

    def resize(self, size: tuple[int, int], resample: int) -> Sized:
        return Sized(*size)

    def tobytes(self) -> bytes:
        return b""


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_thousand_sizes_become_as_many_tokens_as_in_the_reference(name: str) -> None:
    case = CASES[name]
    processor, draw = processor_of(case), random.Random(3)
    for _ in range(1000):
        width, height = (int(10 ** draw.uniform(0, 4)) for _ in range(2))
        picture: Picture = Sized(width, height)  # pyright: ignore[reportAssignmentType]
        try:
            patches = case.reference.get_number_of_image_patches(height, width)
        except ValueError:
            with pytest.raises(MediaError, match=f"this one has {width} x {height} pixels"):
                processor.prepare(picture)
        else:
            assert processor.prepare(picture).embeddings == patches // 4


@pytest.mark.parametrize("strategy", ["default", "full"])
def test_llava_has_as_many_tokens_as_its_tower_gives_rows(strategy: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    whole = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=56, patch_size=14, **sizes).to_dict(),
        text_config=LlamaConfig(vocab_size=128, **sizes).to_dict(),
        image_token_index=100,
        vision_feature_select_strategy=strategy,
    )
    reference = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    processor = processor_of(Case("LlavaForConditionalGeneration", whole.to_dict(), reference))
    item = processor.prepare(noise(70, 60))
    with torch.no_grad():
        pixels = torch.from_numpy(normalised(item, processor))[None]
        features = LlavaForConditionalGeneration(whole).get_image_features(pixels)
    rows = features.pooler_output if hasattr(features, "pooler_output") else features
    assert item.embeddings == len(rows[0])
    assert processor.layout(item).tokens == [100] * len(rows[0])


def test_layouts_say_which_tokens_are_embeddings() -> None:
    gemma, qwen = processor_of(CASES["gemma3"]), processor_of(CASES["qwen2"])
    layout = gemma.layout(gemma.prepare(noise(9, 9)))
    assert layout.tokens == [255_999, *[262_144] * 256, 256_000]
    assert (layout.embeddings, layout.before, layout.after) == ([(1, 256)], "\n\n", "\n\n")
    layout = qwen.layout(qwen.prepare(noise(56, 84)))
    assert (layout.tokens, layout.embeddings, layout.before) == ([7] * 6, [(0, 6)], "")
    clip = processor_of(CASES["clip"])
    assert clip.layout(clip.prepare(noise(9, 9))).embeddings == [(0, 1)]
