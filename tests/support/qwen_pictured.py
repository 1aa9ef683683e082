"""Tiny Qwen-VL checkpoints that see pictures, prompts for them, and what transformers answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from media_files import noise
from pictured import Answer, Prompt, Prompts, expected, write_pictured
from PIL.Image import Image
from safetensors.torch import load_file, save_file
from shape_files import read_shapes
from torch import Tensor, nn
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

OUTPUT = 5
PICTURE = 310
"""The token that stands for pictures."""
_SHAPES = read_shapes("pictured")
TOKENS: dict[str, int] = _SHAPES["qwen tokens"]
OLDER, _NEWER = _SHAPES["qwen older settings"], _SHAPES["qwen newer settings"]
FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    name: (fields["text"], fields["vision"]) for name, fields in _SHAPES.items() if name.startswith("Qwen")
}
"""The text's and the tower's fields of each architecture."""


@dataclass
class Pictured:
    """A checkpoint, prompts with pictures in every place, and the answers of transformers."""

    folder: Path
    model: nn.Module
    prompts: Prompts
    asked: list[Prompt]
    answers: list[Answer]
    settings: dict[str, Any]

    @classmethod
    def write(cls, architecture: str, folder: Path) -> Pictured:
        text, vision = FIELDS[architecture]
        settings = OLDER if architecture.startswith("Qwen2") else _NEWER
        fields = {"text_config": text, "vision_config": vision, "tie_word_embeddings": False, **TOKENS}
        model: Any = write_pictured(architecture, folder, fields, settings)
        with torch.no_grad():
            model.lm_head.weight[PICTURE] = 0  # an answer with it would be a prompt with too few pictures
        model.save_pretrained(folder)
        prompts = Prompts(folder)
        asked = cls._asked(prompts)
        answers = [expected(model, each, OUTPUT, lambda *given: inputs(settings, *given)) for each in asked]
        return cls(folder, model, prompts, asked, answers, settings)

    @torch.inference_mode()
    def hidden(self, prompt: Prompt) -> Tensor:
        """The hidden states of transformers, behind the last norm, for each token."""
        trunk: Any = self.model.model
        beside = inputs(self.settings, prompt.pictures, prompt.tokens) if prompt.pictures else {}
        return trunk(torch.tensor([prompt.tokens]), use_cache=False, **beside).last_hidden_state[0]

    @staticmethod
    def _asked(prompts: Prompts) -> list[Prompt]:
        """transformers takes neighbouring pictures for one, so there are always tokens between them."""
        small, wide, square = noise(28, 28), noise(170, 40), noise(100, 96)
        make = prompts.make
        return [
            make([5, 9, 17, 44, 200, 7]),
            make([5, 312], wide, [313, 44, 200, 7]),
            make(square, [313, 12]),
            make([80, 81, 312], wide),
            make([5], square, [313, 312], small, [7, 8], square, [313, 312], square, [3, 9]),
        ]

    def publish(self) -> None:
        """Write the files as those of 2024 are: the text's fields at the top, and the older names."""
        config = json.loads((self.folder / "config.json").read_text())
        rope = config["text_config"].pop("rope_parameters")
        config |= config.pop("text_config") | {"model_type": config["model_type"]}
        config |= {
            "rope_theta": rope["rope_theta"],
            "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
        }
        (self.folder / "config.json").write_text(json.dumps(config))
        file = self.folder / "model.safetensors"
        tensors = load_file(file)
        save_file({_older_name(name): tensor for name, tensor in tensors.items()}, file)


def _older_name(name: str) -> str:
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


def inputs(settings: dict[str, Any], pictures: list[Image], ids: list[int]) -> dict[str, Any]:
    """What transformers takes beside the ids."""
    made = Qwen2VLImageProcessorPil(**settings)(pictures, return_tensors="pt")
    return {**made, "mm_token_type_ids": (torch.tensor([ids]) == PICTURE).int()}
