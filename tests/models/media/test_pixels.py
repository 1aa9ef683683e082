"""Pixels and counts of tokens beside transformers' image processors on Pillow, bit for bit."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from media_files import media_files, noise
from shape_files import read_shapes
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from transformers.image_utils import ChannelDimension
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import (
    get_resize_output_image_size as idefics3_size,
)
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import (
    get_resize_output_image_size as pixtral_size,
)
from transformers.models.siglip2.image_processing_pil_siglip2 import (
    convert_image_to_patches,
    get_image_size_for_max_num_patches,
)

from models.media.item import Layout, MediaError, Picture, Prepared, Processor
from models.media.registry import make_processor

SIZES = [(1, 1), (1, 7), (27, 28), (29, 31), (57, 56), (200, 1), (335, 337), (640, 480), (1023, 767)]
SIZES += [(3000, 20), (20, 3000), (1600, 1200)]


class Case(NamedTuple):
    architecture: str
    config: dict[str, Any]
    reference: Any


CASES = {
    name: Case(
        each["architecture"], each["config"], getattr(transformers, each["reference"])(**each["settings"])
    )
    for name, each in read_shapes("pixels").items()
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


@pytest.mark.parametrize("name", [name for name in CASES if name != "huge idefics3"])
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
        elif "spatial_shapes" in theirs:
            assert ours.grid == (1, *theirs["spatial_shapes"][0])
            patches = convert_image_to_patches(pixels, 16)
            assert np.array_equal(patches, theirs["pixel_values"][0][: len(patches)])
        else:
            tiles = np.asarray(theirs["pixel_values"]).reshape(-1, *theirs["pixel_values"][0].shape[-3:])
            assert np.array_equal(pixels, tiles.transpose(1, 0, 2, 3).reshape(pixels.shape))


class Sized:
    """A picture without pixels."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = self.size = width, height

    def resize(self, size: tuple[int, int], resample: int) -> Sized:
        return Sized(*size)

    def crop(self, box: tuple[int, int, int, int]) -> Sized:
        return Sized(box[2] - box[0], box[3] - box[1])

    def tobytes(self) -> bytes:
        return b""


def qwen_tokens(case: Case, height: int, width: int) -> int:
    return case.reference.get_number_of_image_patches(height, width) // 4


def pixtral_text(case: Case, height: int, width: int) -> str:
    """The text that stands for a picture in a prompt."""
    unit = case.reference.patch_size["height"]
    empty = np.broadcast_to(np.uint8(0), (3, height, width))
    size = pixtral_size(empty, case.reference.size["longest_edge"], unit, ChannelDimension.FIRST)
    row = "#" * (size[1] // unit)
    return "[IMG_BREAK]".join([row] * (size[0] // unit)) + "[IMG_END]"


class Unresized(Idefics3ImageProcessorPil):
    """A reference without pixels."""

    def resize(self, image: np.ndarray, size: Any, **options: object) -> np.ndarray:
        height, width = size.height, size.width
        if size.longest_edge:
            height, width = idefics3_size(image, size.longest_edge)
        return np.broadcast_to(np.uint8(0), (3, height, width))


def idefics3_text(case: Case, height: int, width: int) -> str:
    processor = Unresized(**case.reference.to_dict())
    side = processor.max_image_size["longest_edge"]
    image = np.broadcast_to(np.uint8(0), (3, height, width))
    image = processor.resize(image, processor.size)
    image = processor.resize_for_vision_encoder(image, side)
    _, rows, columns = processor.split_images(image, {"longest_edge": side})
    fake = SimpleNamespace(
        fake_image_token="<fake_token_around_image>",
        image_token="#",
        global_image_tag="<global-img>",
        image_seq_len=4,
    )
    return Idefics3Processor.replace_image_token(fake, {"rows": [[rows]], "cols": [[columns]]}, 0)


def internvl_text(case: Case, height: int, width: int) -> str:
    tiles = case.reference.get_number_of_image_patches(height, width)
    return f"<img>{'#' * 4 * tiles}</img>"


def next_text(case: Case, height: int, width: int) -> str:
    one = case.architecture.startswith("LlavaOnevision")
    kind = LlavaOnevisionProcessor if one else LlavaNextProcessor
    fake = kind.__new__(kind)
    fake.image_processor, fake.patch_size = case.reference, 14
    fake.num_additional_image_tokens, fake.num_image_tokens = 0, 16
    fake.vision_aspect_ratio = case.config.get("vision_aspect_ratio")
    return "#" * fake._get_number_of_features(height, width, 56, 56)


TEXTS = {
    "pixtral": pixtral_text,
    "mistral3": pixtral_text,
    "idefics3": idefics3_text,
    "smolvlm": idefics3_text,
    "huge idefics3": idefics3_text,
    "internvl": internvl_text,
    "llava next": next_text,
    "onevision": next_text,
}


def text_of(layout: Layout) -> str:
    """The text of a layout, with a # for each embedding."""
    known: list[str] = []

    def encode(text: str) -> list[int]:
        known.append(text)
        return [-len(known), 10**6]

    spelled = layout.spelled(encode)
    embeddings = {first + index for first, length in spelled.embeddings for index in range(length)}
    shown = ""
    for place, token in enumerate(spelled.tokens):
        shown += "#" if place in embeddings else known[-token - 1] if token < 0 else ""
        assert (place in embeddings) == (0 <= token < 10**6)
    return shown


@pytest.mark.parametrize("name", ["qwen2", "qwen3", *TEXTS])
def test_a_thousand_sizes_become_as_many_tokens_as_in_the_reference(name: str) -> None:
    case = CASES[name]
    processor, draw = processor_of(case), random.Random(3)
    counted = TEXTS.get(name, qwen_tokens)
    for _ in range(1000):
        width, height = (int(10 ** draw.uniform(0, 4)) for _ in range(2))
        picture: Picture = Sized(width, height)  # pyright: ignore[reportAssignmentType]
        if max(width, height) > 200 * min(width, height) and name not in ("pixtral", "mistral3", "internvl"):
            with pytest.raises(MediaError, match=f"this one has {width} x {height} pixels"):
                processor.prepare(picture)
            continue
        item, expected = processor.prepare(picture), counted(case, height, width)
        if isinstance(expected, int):
            assert item.embeddings == expected
        elif "#" in expected:
            assert item.embeddings == expected.count("#")
            assert text_of(processor.layout(item)) == expected


def test_a_thousand_sizes_have_the_shapes_of_siglip2() -> None:
    processor, draw = processor_of(CASES["siglip2"]), random.Random(5)
    for _ in range(1000):
        width, height = (int(10 ** draw.uniform(0, 4)) for _ in range(2))
        picture: Picture = Sized(width, height)  # pyright: ignore[reportAssignmentType]
        expected = get_image_size_for_max_num_patches(height, width, 16, 100)
        assert processor.prepare(picture).shape == (*expected, 3)


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
