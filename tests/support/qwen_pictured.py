"""Tiny Qwen-VL checkpoints that see pictures, prompts for them, and what transformers answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from media_files import noise
from pictured import TEXT, Answer, Prompt, Prompts, expected, write_pictured
from PIL.Image import Image
from safetensors.torch import load_file, save_file
from tiny_shapes import HYBRIDS
from torch import Tensor, nn
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

OUTPUT = 5
PICTURE = 310
"""The token that stands for pictures."""
TOKENS = {
    "image_token_id": PICTURE,
    "video_token_id": 311,
    "vision_start_token_id": 312,
    "vision_end_token_id": 313,
}
_HALF = [0.5, 0.5, 0.5]
OLDER = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 784, "max_pixels": 28 * 28 * 12}
_NEWER = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 1024, "longest_edge": 32 * 32 * 12},
    "patch_size": 16,
    "image_mean": _HALF,
    "image_std": _HALF,
}
_SIZES = {"depth": 3, "num_heads": 4, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32}
_TABLE = {**_SIZES, "num_position_embeddings": 16}
_DEEP = {**_TABLE, "deepstack_visual_indexes": [0, 2]}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}


def _text(interleaved: bool, **fields: object) -> dict[str, object]:
    """The fields of a text in which all axes turn pairs."""
    rope = {"rope_type": "default", "rope_theta": 1e3, "mrope_section": [2, 1, 1]}
    if interleaved:
        rope |= {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    return {**TEXT, "rope_parameters": rope, **fields}


def _hybrid(architecture: str) -> dict[str, object]:
    own = {name: value for name, value in HYBRIDS[architecture].items() if name not in TEXT}
    text = _text(True, **own, num_hidden_layers=4)
    rope = {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    return {**text, "rope_parameters": {**_rope_of(text), **rope}}


def _rope_of(text: dict[str, object]) -> dict[str, object]:
    rope = text["rope_parameters"]
    assert isinstance(rope, dict)
    return rope


_OF_8 = {name: value for name, value in _text(False).items() if name != "head_dim"}
FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2VLForConditionalGeneration": (_OF_8, {**_SIZES, "embed_dim": 32, "mlp_ratio": 2}),
    "Qwen2_5_VLForConditionalGeneration": (
        _OF_8,
        {**_SIZES, "window_size": 56, "fullatt_block_indexes": [1], "tokens_per_second": 1},
    ),
    "Qwen3VLForConditionalGeneration": (_text(True), _DEEP),
    "Qwen3VLMoeForConditionalGeneration": (_text(True, **_EXPERTS), _DEEP),
    "Qwen3_5ForConditionalGeneration": (_hybrid("Qwen3_5ForCausalLM"), _TABLE),
    "Qwen3_5MoeForConditionalGeneration": (_hybrid("Qwen3_5MoeForCausalLM"), _TABLE),
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
