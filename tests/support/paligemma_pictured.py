"""Tiny PaliGemmas, whose prompts see themselves both ways: their configs, and what transformers answers."""

import json
from pathlib import Path
from typing import Any

import torch
from pictured import TEXT, VISION, Answer, Prompt, expected, write_pictured
from pictured_chat import write_chat_files
from PIL.Image import Image
from shape_files import read_shapes
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

SETTINGS: dict[str, Any] = read_shapes("pictured")["paligemma settings"]
PICTURE = 310
_SECOND = read_shapes("pictured")["gemma2 of paligemma"]
"""The second version has windows, which are shorter than prompts here."""


def fields(version: int) -> dict[str, Any]:
    return {
        "model_type": "paligemma",
        "text_config": {**TEXT, "model_type": "gemma"} if version == 1 else _SECOND,
        "vision_config": {**VISION, "model_type": "siglip_vision_model"},
        "image_token_index": PICTURE,
        "projection_dim": TEXT["hidden_size"],
        "hidden_size": TEXT["hidden_size"],
    }


def write(version: int, folder: Path) -> nn.Module:
    return write_pictured("PaliGemmaForConditionalGeneration", folder, fields(version), SETTINGS)


def write_with_tokenizer(folder: Path) -> tuple[nn.Module, Tokenizer]:
    """Saves a model of the second version, which has no chat template, and the tokenizer's `<bos>`."""
    model = write(2, folder)
    tokenizer = write_chat_files(folder, {309: "<bos>", PICTURE: "<image>"}, "<image>")
    path = folder / "tokenizer_config.json"
    settings = {**json.loads(path.read_text()), "bos_token": "<bos>"}
    del settings["chat_template"]
    path.write_text(json.dumps(settings))
    return model, tokenizer


class _SeesPrompt(nn.Module):
    """The model for one prompt, of which it is told where it ends."""

    def __init__(self, model: nn.Module, length: int) -> None:
        super().__init__()
        self.model, self.length = model, length

    def forward(self, input_ids: Tensor, **beside: Any) -> Any:
        types = (torch.arange(input_ids.shape[1]) >= self.length).long()[None]
        return self.model(input_ids=input_ids, token_type_ids=types, **beside)


def answer(model: nn.Module, prompt: Prompt, count: int) -> Answer:
    return expected(_SeesPrompt(model, len(prompt.tokens)), prompt, count, inputs)


def inputs(pictures: list[Image], ids: list[int]) -> dict[str, Any]:
    """What transformers' model takes beside ids and their types."""
    return {
        "pixel_values": SiglipImageProcessorPil(**SETTINGS)(pictures, return_tensors="pt")["pixel_values"]
    }
