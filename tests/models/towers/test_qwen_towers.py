"""The towers of Qwen-VL on tiny random weights give the rows of transformers' visual modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from media_files import noise
from safetensors.torch import save_file
from tiny import randomise
from torch import Tensor
from towers import CLIP_PICTURES
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3

from models.checkpoint.weights import load, open_weights
from models.config import ConfigError
from models.media.files import PictureSettings
from models.towers.qwen_vl import Qwen2Tower, Qwen3Tower, Qwen25Tower, QwenTower
from models.towers.tower import TowerInput, TowerSetup, finish

CPU = torch.device("cpu")
WIDTH = 24
"""The width of the text."""
SIDES = [(1, 1), (3, 4), (1, 9), (13, 1), (5, 5), (4, 8)]
"""The rows and columns of squares: one, long strips, and windows that are whole or cut at their edges."""
SIZES = {"depth": 4, "num_heads": 4}
NEWER = {**SIZES, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": WIDTH}
WITH_TABLE = {**NEWER, "num_position_embeddings": 36}
VISION: dict[str, dict[str, Any]] = {
    "qwen2": {**SIZES, "embed_dim": 32, "hidden_size": WIDTH, "mlp_ratio": 3},
    "qwen2.5": {**NEWER, "window_size": 56, "fullatt_block_indexes": [1, 3]},
    "qwen3": {**WITH_TABLE, "deepstack_visual_indexes": [0, 2]},
    "qwen3.5": WITH_TABLE,
}
REFERENCES: dict[str, Any] = {
    "qwen2": qwen2.Qwen2VisionTransformerPretrainedModel,
    "qwen2.5": qwen2_5.Qwen2_5_VisionTransformerPretrainedModel,
    "qwen3": qwen3.Qwen3VLVisionModel,
    "qwen3.5": qwen3_5.Qwen3_5VisionModel,
}
TOWERS: dict[str, type[QwenTower]] = {
    "qwen2": Qwen2Tower,
    "qwen2.5": Qwen25Tower,
    "qwen3": Qwen3Tower,
    "qwen3.5": Qwen3Tower,
}
TEXT = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}}
HALF = (0.5, 0.5, 0.5)
HALF_PICTURES = PictureSettings(resample=3, image_mean=HALF, image_std=HALF)


class Pair:
    """A tower of transformers with random weights, and ours with the same."""

    def __init__(self, kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        made = REFERENCES[kind]
        config = made.config_class(**VISION[kind])
        self.patch = config.patch_size
        self.pictures = CLIP_PICTURES if self.patch == 14 else HALF_PICTURES
        self.reference = made._from_config(config, attn_implementation="eager").eval()
        randomise(self.reference, seed=1, scale=0.2)
        tensors = {f"model.visual.{name}": each for name, each in self.reference.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")
        whole = {"vision_config": config.to_dict(), **TEXT}
        setup = TowerSetup(config=whole, pictures=self.pictures, hidden_size=WIDTH, dtype=dtype)
        self.tower = TOWERS[kind](setup)
        load(self.tower, open_weights(folder, device=CPU, dtype=dtype))

    def item(self, rows: int, columns: int) -> tuple[TowerInput, Tensor, Tensor]:
        """A picture of noise with so many squares, and what transformers takes: its patches and its grid."""
        side = 2 * self.patch
        picture = noise(columns * side, rows * side)
        mean, deviation = self.pictures.image_mean, self.pictures.image_std
        given = Qwen2VLImageProcessorPil(
            do_resize=False, patch_size=self.patch, image_mean=mean, image_std=deviation
        )(picture, return_tensors="pt")
        pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        shape, grid = (picture.height, picture.width, 3), given["image_grid_thw"]
        found = TowerInput("image", pixels.view(shape), (1, 2 * rows, 2 * columns), rows * columns)
        assert grid.tolist() == [list(found.grid)]
        return found, given["pixel_values"], grid

    def expected(self, patches: Tensor, grid: Tensor) -> Tensor:
        with torch.inference_mode():
            made = self.reference(patches, grid_thw=grid)
        return torch.cat([made.pooler_output, *(made.get("deepstack_features") or [])], dim=1)

    def encode(self, *items: TowerInput) -> list[Tensor]:
        with torch.inference_mode():
            return finish(self.tower.encode(items))


@pytest.fixture(params=VISION)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    return Pair(request.param, tmp_path)


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", VISION)
def test_a_picture_has_the_same_bits_in_any_company(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    pair = Pair(kind, tmp_path, dtype)
    items = [pair.item(*sides) for sides in SIDES]
    together = pair.encode(*(item[0] for item in items))
    for got, (item, patches, grid) in zip(together, items, strict=True):
        assert torch.equal(pair.encode(item)[0], got)
        right = pair.expected(patches, grid)
        tolerance = {"atol": 1e-4, "rtol": 0.0} if dtype == torch.float32 else {"atol": 0.2, "rtol": 0.05}
        torch.testing.assert_close(got.float(), right, **tolerance)


def test_the_frames_of_a_video_are_computed_in_pairs(pair: Pair) -> None:
    first, second = pair.item(3, 4), pair.item(3, 4)
    shifted = first[0].pixels.roll(1, dims=0)
    frames = torch.stack([first[0].pixels, first[0].pixels, shifted, shifted])
    video = TowerInput("video", frames.flatten(0, 1), (2, 6, 8), 24)
    alone = TowerInput("image", shifted, (1, 6, 8), 12)
    got = pair.encode(video)[0]
    assert torch.allclose(got, torch.cat(pair.encode(second[0], alone)), atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("qwen2", {"num_heads": 3}, "width 32 is not divided by 'num_heads' 3"),
        ("qwen2", {"depth": 0}, r"vision_config in config.json: .*at `\$.depth`"),
        ("qwen2.5", {"window_size": 20}, "'window_size' is less than a square"),
        ("qwen3", {"rope_scaling": None}, "rope parameters lack 'mrope_section'"),
        ("qwen3", {"deepstack_visual_indexes": [4]}, "but the tower has the layers 0 to 3"),
    ],
)
def test_configs_that_cannot_be_are_refused(kind: str, fields: dict[str, Any], message: str) -> None:
    config = {"vision_config": {**VISION[kind], **fields}, **TEXT, **fields}
    setup = TowerSetup(config=config, pictures=CLIP_PICTURES, hidden_size=WIDTH, dtype=torch.float32)
    with pytest.raises(ConfigError, match=message):
        TOWERS[kind](setup)
