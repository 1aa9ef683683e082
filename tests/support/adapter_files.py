"""Folders of adapters whose tensors are zeros or random, written without PEFT."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from models.lora_config import CONFIG_FILE, PREFIX, TENSORS_FILE

PLAIN = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "base",
    "r": 4,
    "lora_alpha": 8,
}
Q_PROJ = "model.layers.0.self_attn.q_proj"


def write_adapter(
    folder: Path,
    shapes: Mapping[str, Sequence[int]] | None = None,
    fields: Mapping[str, object] | None = None,
    seed: int = 0,
) -> Path:
    """Write an adapter with these tensors, named without PREFIX; `fields` go into its config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps({**PLAIN, **(fields or {})}))
    shapes = shapes or {f"{Q_PROJ}.lora_A.weight": (4, 8), f"{Q_PROJ}.lora_B.weight": (8, 4)}
    drawn = torch.Generator().manual_seed(seed)
    tensors = {PREFIX + name: torch.randn(*shape, generator=drawn) * 0.1 for name, shape in shapes.items()}
    save_file(tensors, folder / TENSORS_FILE)
    return folder
