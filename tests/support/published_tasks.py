"""Tiny checkpoints in the form in which jina-embeddings-v3 was published."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TASKS = ("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching")
INSTRUCTIONS = {**dict.fromkeys(TASKS, ""), "retrieval.query": "Find ", "retrieval.passage": "Keep "}
RANK, ALPHA = 4, 1


def publish(saved: Path, folder: Path, *, size: float = 0.6) -> Path:
    """Write what transformers has saved as it was published: with random factors for five tasks."""
    shutil.copytree(saved, folder)
    drawn = torch.Generator().manual_seed(5)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(saved / "model.safetensors").items():
        name = f"roberta.{name}"
        scope, _, kind = name.rpartition(".")
        if kind == "bias" or "norm" in scope or "emb_ln" in scope:
            tensors[name] = tensor
            continue
        rows, columns = tensor.shape
        a, b = ((rows, RANK), (RANK, columns)) if "embeddings" in scope else ((RANK, columns), (rows, RANK))
        tensors[f"{scope}.parametrizations.weight.original"] = tensor
        for letter, shape in (("A", a), ("B", b)):
            factors = size * torch.randn(len(TASKS), *shape, generator=drawn)
            tensors[f"{scope}.parametrizations.weight.0.lora_{letter}"] = factors
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((saved / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    config |= {
        "architectures": ["XLMRobertaModel"],
        "model_type": "xlm-roberta",
        "position_embedding_type": "rotary",
        "rotary_emb_base": theta,
        "lora_adaptations": TASKS,
        "lora_rank": RANK,
        "lora_alpha": ALPHA,
        "task_instructions": INSTRUCTIONS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def merge(published: Path, saved: Path, folder: Path, task: str) -> Path:
    """Write the sums of all matrices and their factors for a task, as transformers reads them."""
    shutil.copytree(saved, folder)
    stored, number, scale = load_file(published / "model.safetensors"), TASKS.index(task), ALPHA / RANK
    sums: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        module, _, kind = name.removeprefix("roberta.").partition(".parametrizations.weight.")
        if kind == "original":
            a, b = (stored[name.replace("original", f"0.lora_{letter}")][number] for letter in "AB")
            sums[f"{module}.weight"] = tensor + scale * (a @ b if "embeddings" in module else b @ a)
        elif not kind:
            sums[module] = tensor
    save_file(sums, folder / "model.safetensors")
    return folder
