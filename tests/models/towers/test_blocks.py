"""Towers of tiny random weights give the rows of transformers' towers, and patches their pixels."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import randomise
from torch import Tensor
from towers import CLIP_PICTURES, VISION, item, normalised

from models.checkpoint.weights import load, open_weights
from models.config import ConfigError
from models.layers.norm import enter
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
