"""Embeddings of pictures: each family takes as many as its own pictures have, laid out like those."""

import base64
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from media_files import QWEN, media_files, noise, tower
from transformers import CLIPImageProcessorPil

from models.media.files import MediaFiles
from models.media.item import MediaError, Prepared, Processor
from models.media.registry import make_processor
from server.media.preparing_job import read_encoded

WIDTH = 5
CLIP = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
LLAVA = media_files("LlavaForConditionalGeneration", tower("clip", image_size=56, patch_size=14), CLIP)
NEXT = media_files(
    "LlavaNextForConditionalGeneration",
    tower("clip", image_size=56, patch_size=14),
    {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": [[56, 112], [112, 56]]}
    | {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
)
PIXTRAL = media_files(
    "LlavaForConditionalGeneration",
    tower("pixtral", patch_size=16) | {"vision_config": {"model_type": "pixtral", "patch_size": 16}},
    {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 64}},
)
SMOL = media_files(
    "SmolVLMForConditionalGeneration",
    {"vision_config": {"image_size": 32, "patch_size": 8}, "image_token_id": 9},
    {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 64}}
    | {"max_image_size": {"longest_edge": 32}},
)


def file(value: Any) -> bytes:
    made = BytesIO()
    np.save(made, value)
    return base64.b64encode(made.getvalue())


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, WIDTH)).astype(np.float32)


def processor(files: MediaFiles) -> Processor:
    return make_processor(files)


@pytest.mark.parametrize(
    ("files", "told"),
    [(QWEN, True), (LLAVA, False), (LLAVA, True), (NEXT, False), (PIXTRAL, True), (SMOL, True)],
    ids=["qwen", "llava", "llava, grid", "llava next", "pixtral", "smolvlm"],
)
def test_embeddings_are_laid_out_like_pictures(files: MediaFiles, told: bool) -> None:
    own = processor(files)
    picture = own.prepare(noise(90, 60))
    values, grid = rows(picture.embeddings), ",".join(map(str, picture.grid)) if told else ""
    found = read_encoded(file(values), grid, WIDTH, own)
    assert (found.kind, found.embeddings) == ("encoded", picture.embeddings)
    assert found.shape == (picture.embeddings, WIDTH, 4) and bytes(found.pixels) == values.tobytes()
    assert found.grid == (picture.grid if told else (1, 1, picture.embeddings))
    assert own.layout(found) == own.layout(picture)


def test_files_may_have_one_picture_of_several_and_its_grid() -> None:
    own = processor(QWEN)
    values = rows(6)
    grid = file(np.array([[1, 4, 6]])).decode()
    found = read_encoded(file(values[None].astype(np.float16)), grid, WIDTH, own)
    assert found.grid == (1, 4, 6)
    assert bytes(found.pixels) == values.astype(np.float16).astype(np.float32).tobytes()


@pytest.mark.parametrize(
    ("files", "values", "grid", "message"),
    [
        (
            QWEN,
            rows(6),
            "",
            "A picture with no image_grid_thw has 0 embeddings of this model, and image_embeds has 6",
        ),
        (QWEN, rows(6), "1,4,4", r"with image_grid_thw \[1, 4, 4\] has 4 embeddings"),
        (QWEN, rows(6), "1,1,24", "has 0 embeddings"),
        (QWEN, rows(6), "1,4,-6", "has 0 embeddings"),
        (QWEN, rows(6), "1,99999999999,99999999999", "has 0 embeddings"),
        (QWEN, rows(6), "4,6", "has 0 embeddings"),
        (QWEN, rows(6), "1,x,6", "a list of three whole numbers"),
        (QWEN, rows(6), "AAAA", "a list of three whole numbers"),
        (QWEN, rows(0), "", "image_embeds has 0"),
        (LLAVA, rows(6), "", "has 16 embeddings of this model, and image_embeds has 6"),
        (PIXTRAL, rows(6), "", "has 0 embeddings"),
        (PIXTRAL, rows(6), "1,2,4", "has 8 embeddings"),
        (
            LLAVA,
            rows(16)[:, :4],
            "",
            r"in rows of 5, for each embedding one, and these have the shape \[16, 4\]",
        ),
        (LLAVA, rows(16)[0], "", "finite numbers in rows of 5"),
        (LLAVA, np.stack([rows(16)] * 2), "", "finite numbers in rows of 5"),
        (LLAVA, rows(16).astype(np.float64), "", "one contiguous tensor"),
        (LLAVA, np.where(np.arange(5) == 3, np.inf, rows(16)).astype(np.float32), "", "finite numbers"),
        (LLAVA, np.ones((16, WIDTH), np.int64), "", "finite numbers in rows of 5"),
        (LLAVA, np.array([[None] * 5]), "", "one contiguous tensor"),
    ],
)
def test_what_is_no_picture_is_refused(files: MediaFiles, values: Any, grid: str, message: str) -> None:
    with pytest.raises(MediaError, match=message):
        read_encoded(file(values), grid, WIDTH, processor(files))


def test_models_that_compare_take_pictures_only() -> None:
    files = media_files("CLIPModel", tower("clip", image_size=56, patch_size=14), CLIP)
    with pytest.raises(MediaError, match="send pictures, not image_embeds"):
        read_encoded(file(rows(1)), "", WIDTH, processor(files))


def test_an_item_is_what_the_engine_takes() -> None:
    found: Prepared = read_encoded(file(rows(16)), "", WIDTH, processor(LLAVA))
    assert np.prod(found.grid) <= np.prod(found.shape) == len(found.pixels)
