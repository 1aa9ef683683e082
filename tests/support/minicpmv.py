"""Tiny random models of MiniCPM-V, composed of torch's attention and parts of transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pictured import TEXT, Answer, Prompt, expected
from PIL.Image import Image, Resampling
from safetensors.torch import save_file
from shape_files import read_shapes
from tiny import randomise
from torch import Tensor, nn
from transformers import Idefics2VisionConfig, LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer

SIZE, QUERIES, PATCH, SIDE = 256, 3, 14, 56
TEXTS: dict[str, Any] = {
    "2.5": LlamaForCausalLM,
    "2.6": Qwen2ForCausalLM,
    "4.0": LlamaForCausalLM,
    "4.5": Qwen3ForCausalLM,
}
VISION: dict[str, Any] = read_shapes("pictured")["minicpmv tower"]


class Resampler(nn.Module):
    """The resampler under its published names, of torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(QUERIES, SIZE))
        self.kv_proj = nn.Linear(VISION["hidden_size"], SIZE, bias=False)
        self.attn = nn.MultiheadAttention(SIZE, SIZE // 128)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(SIZE, eps=1e-6) for _ in range(3))
        self.proj = nn.Parameter(torch.empty(SIZE, SIZE))

    def forward(self, x: Tensor, rows: int, columns: int) -> Tensor:
        places = torch.tensor([place(row, column) for row in range(rows) for column in range(columns)])
        values = self.ln_kv(self.kv_proj(x))
        read, _ = self.attn(self.ln_q(self.query), values + places, values)
        return self.ln_post(read) @ self.proj


def place(row: int, column: int) -> list[float]:
    angles = [[at / 10_000 ** (i / (SIZE / 4)) for i in range(SIZE // 4)] for at in (column, row)]
    return [turn(angle) for half in angles for turn in (math.sin, math.cos) for angle in half]


def cut(picture: Image) -> list[Image]:
    """The whole picture and its slices, as the authors' code makes them with `max_slice_nums` 9."""
    count = min(9, math.ceil(picture.width * picture.height / SIDE**2))
    if count == 1:
        return [resized(picture, picture.width, picture.height, enlarge=True)]
    best, least = (1, 1), math.inf
    for number in (count - 1, count, count + 1):
        for columns in range(1, number + 1):
            if number in (1, 10) or number % columns:
                continue
            grid = columns, number // columns
            error = abs(math.log(picture.width / picture.height) - math.log(grid[0] / grid[1]))
            if error < least:
                best, least = grid, error
    columns, rows = best
    part = [max(1, round(length / n)) for length, n in zip(picture.size, best, strict=True)]
    width, height = resized(picture, *part, enlarge=True).size
    large = picture.resize((width * columns, height * rows), Resampling.BICUBIC)
    corners = [(x * width, y * height) for y in range(rows) for x in range(columns)]
    slices = [large.crop((x, y, x + width, y + height)) for x, y in corners]
    return [resized(picture, picture.width, picture.height), *slices]


def resized(picture: Image, width: float, height: float, *, enlarge: bool = False) -> Image:
    if enlarge or width * height > SIDE**2:
        ratio = width / height
        height = int(SIDE / math.sqrt(ratio))
        width = int(height * ratio)
    size = [max(PATCH, round(length / PATCH) * PATCH) for length in (width, height)]
    return picture.resize((size[0], size[1]), Resampling.BICUBIC)


class Composed(nn.Module):
    """A whole model, which is computed slice by slice, and saved as a checkpoint."""

    def __init__(self, version: str, folder: Path) -> None:
        super().__init__()
        self.version = version
        kind = TEXTS[version]
        fields = {**TEXT, "hidden_size": SIZE, "intermediate_size": 64, "tie_word_embeddings": False}
        config = kind.config_class(**fields, dtype="float32")
        self.llm = kind._from_config(config, attn_implementation="eager")
        self.vpm = Idefics2VisionTransformer._from_config(
            Idefics2VisionConfig(**VISION, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6),
            attn_implementation="eager",
        )
        self.resampler = Resampler()
        randomise(self, seed=0, scale=0.1)
        self.eval()
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")
        whole = {
            **config.to_dict(),
            "architectures": ["MiniCPMV"],
            "model_type": "minicpmv",
            "vision_config": {**VISION, "model_type": "siglip"},
            "query_num": QUERIES,
        }
        stated: dict[str, Any] = {} if version == "2.5" else {"version": float(version)}
        (folder / "config.json").write_text(json.dumps({**whole, **stated}))
        settings = {
            "image_processor_type": "MiniCPMVImageProcessor",
            "scale_resolution": SIDE,
            "norm_mean": [0.4, 0.5, 0.5],
            "norm_std": [0.5, 0.25, 0.5],
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))

    @torch.no_grad()
    def rows(self, picture: Image) -> Tensor:
        return torch.cat([self._slice(piece) for piece in cut(picture)])

    def _slice(self, picture: Image) -> Tensor:
        mean, deviation = torch.tensor([0.4, 0.5, 0.5]), torch.tensor([0.5, 0.25, 0.5])
        pixels = (torch.from_numpy(np.array(picture)).float() / 255 - mean) / deviation
        pixels, rows, columns = pixels.permute(2, 0, 1), picture.height // PATCH, picture.width // PATCH
        shape = rows, columns
        if self.version == "2.5":  # the tower is told of one row of patches
            pixels = torch.cat([part for row in pixels.split(PATCH, 1) for part in row.split(PATCH, 2)], 2)
            shape = 1, rows * columns
        mask = torch.ones(1, *shape, dtype=torch.bool)
        hidden = self.vpm(pixel_values=pixels[None], patch_attention_mask=mask).last_hidden_state[0]
        return self.resampler(hidden, rows, columns)

    def forward(self, input_ids: Tensor, use_cache: bool, places: Any = (), rows: Any = None) -> Any:
        embeds = self.llm.get_input_embeddings()(input_ids)
        if rows is not None:
            embeds[0, places] = rows
        return self.llm(inputs_embeds=embeds, use_cache=use_cache)

    def expected(self, prompt: Prompt, count: int) -> Answer:
        """The likeliest tokens behind a prompt."""
        places = [
            place.at + first + index
            for place in prompt.media
            for first, length in place.runs
            for index in range(length)
        ]
        rows = [self.rows(picture) for picture in prompt.pictures]
        beside = {"places": places, "rows": torch.cat(rows) if rows else None}
        return expected(self, prompt, count, lambda pictures, ids: beside)
