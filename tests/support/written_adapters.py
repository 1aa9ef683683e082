"""Adapters as PEFT saves them, written by hand for a checkpoint of Llama's names."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

RANK = 4


def write_adapter(folder: Path, base: Path, seed: int, size: float = 0.5, labels: int = 0) -> Path:
    """Random matrices for q_proj of all layers; with `size` 0 it computes what its base does.

    `labels`: those of a head of its own for texts, if it has one."""
    config = json.loads((base / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    outputs = heads * config.get("head_dim", hidden // heads)
    drawn = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = drawn.normal(size=(RANK, hidden)).astype("f4")
        tensors[f"{name}.lora_B.weight"] = (size * drawn.normal(size=(outputs, RANK))).astype("f4")
    if labels:
        tensors["base_model.model.score.weight"] = drawn.normal(size=(labels, hidden)).astype("f4")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if labels else "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 8,
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder
