"""Towers of tiny random weights give the rows of transformers' towers, and patches their pixels."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import randomise
from torch import Tensor
from torch.nn import functional as F
from towers import CLIP_PICTURES, VISION, item, normalised
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from models import ops
from models.checkpoint.weights import load, open_weights
from models.config import ConfigError
from models.layers.norm import enter
from models.towers.blocks import PatchEmbedding, segments
from models.towers.tower import finish
from models.towers.vit import VisionTransformer, read_vit

KINDS = ["clip", "siglip"]
CPU = torch.device("cpu")


def reference(kind: str, folder: Path, **fields: object) -> Any:
    """transformers' tower with random weights, which are saved in `folder`."""
    name = {"clip": "CLIP", "siglip": "Siglip"}[kind]
    config = getattr(transformers, f"{name}VisionConfig")(**{**VISION, **fields})
    model = getattr(transformers, f"{name}VisionModel")(config).eval()
    randomise(model, seed=1, scale=0.15)
    model.save_pretrained(folder)
    return model


def built(
    model: Any, folder: Path, dtype: torch.dtype = torch.float32, without: int = 0
) -> VisionTransformer:
    fields = read_vit({"vision_config": model.config.to_dict()})
    tower = VisionTransformer(fields, CLIP_PICTURES, without=without)
    weights = open_weights(folder, device=CPU, dtype=dtype)
    load(tower, weights.first("vision_model", ""))
    return tower


def rows(tower: VisionTransformer, *items: Any) -> list[Tensor]:
    with torch.inference_mode():
        _, stream = enter(None, *finish(tower(items)))
    return list(stream.split(tower.rows))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("without", [0, 1])
def test_rows_are_those_of_transformers(kind: str, without: int, tmp_path: Path) -> None:
    model = reference(kind, tmp_path)
    tower = built(model, tmp_path, without=without)
    items = [item(56, 56, seed) for seed in range(3)]
    for one, got in zip(items, rows(tower, *items), strict=True):
        with torch.inference_mode():
            states = model(normalised(one, CLIP_PICTURES), output_hidden_states=True).hidden_states
        torch.testing.assert_close(got, states[-1 - without][0], atol=1e-4, rtol=0)


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_picture_has_the_same_bits_in_any_company(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = reference(kind, tmp_path, hidden_act="gelu")
    tower = built(model, tmp_path, dtype)
    items = [item(56, 56, seed) for seed in range(3)]
    for one, got in zip(items, rows(tower, *items), strict=True):
        assert torch.equal(rows(tower, one)[0], got)
        exact = model(normalised(one, CLIP_PICTURES), output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(
            got.float(), exact, atol=1e-4 if got.dtype == exact.dtype else 0.1, rtol=0.02
        )


def test_other_towers_and_channels_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="'vit', and only clip_vision_model and siglip_vision_model are served"
    ):
        read_vit({"vision_config": {"model_type": "vit"}})
    with pytest.raises(ConfigError, match=r"vision_config in config.json: .*num_channels"):
        read_vit({"vision_config": {"model_type": "clip_vision_model", "num_channels": 4}})


def levels() -> Tensor:
    embedding = PatchEmbedding(8, 14, CLIP_PICTURES, bias=False)
    load(embedding, open_weights(Path("none"), "dummy", device=CPU, dtype=torch.float32))
    return embedding.levels


@pytest.mark.parametrize(("height", "width"), [(56, 84), (61, 97)])
def test_patches_are_those_of_a_convolution(height: int, width: int) -> None:
    one = item(width, height)
    cut = ops.patches(one.pixels[None], levels(), 14)
    whole = normalised(one, CLIP_PICTURES)[:, :, : height // 14 * 14, : width // 14 * 14]
    assert torch.equal(cut, F.unfold(whole, 14, stride=14)[0].t())


@pytest.mark.parametrize("frames", [1, 4])
def test_patches_in_squares_are_those_of_qwen(frames: int) -> None:
    items = [item(84, 56, seed) for seed in range(frames)]
    pixels = torch.stack([one.pixels for one in items])
    processor = Qwen2VLImageProcessorPil(patch_size=14)
    moving = torch.cat([normalised(one, CLIP_PICTURES) for one in items]).numpy()
    cut = ops.patches(pixels, levels(), 14, depth=2, merge=2)
    if frames == 1:
        expected, *_ = processor.patchify(moving[0], 14, 2, 2)
        assert torch.equal(cut, torch.from_numpy(expected))
        return
    for pair in range(2):  # each pair of frames has the patches of both, frame by frame within each channel
        first, second = (processor.patchify(moving[2 * pair + at], 14, 2, 2)[0] for at in range(2))
        shape = (len(first), 3, 2, 196)
        expected = torch.from_numpy(first).view(shape).clone()
        expected[:, :, 1] = torch.from_numpy(second).view(shape)[:, :, 1]
        assert torch.equal(cut.view(2, *shape)[pair], expected)


def test_segments_count_positions_anew() -> None:
    step = segments([2, 3], CPU)
    assert step.positions.tolist() == [0, 1, 0, 1, 2]
    assert step.query_starts.tolist() == [0, 2, 5]
