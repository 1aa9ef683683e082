"""Tiny checkpoints whose texts have several representations."""

import json
from pathlib import Path

import torch
from later import Later
from pooled import sibling_checkpoint
from tiny import tiny_checkpoint
from torch import nn


def source_of(architecture: str, folder: Path, *, of: str = "", **tokens: str) -> Path:
    """A tiny checkpoint without a chat template, with which texts would become messages.

    `of`: the generating architecture of which it is the trunk. `tokens` are special tokens by their names.
    """
    if of:
        sibling_checkpoint(architecture, of, folder / "made").rename(folder.parent / "trunk")
        for path in (folder.parent / "trunk").iterdir():
            path.rename(folder / path.name)
    else:
        tiny_checkpoint(architecture, folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | tokens
    del settings["chat_template"]
    path.write_text(json.dumps(settings))
    return folder


def flag_checkpoint(folder: Path, *, form: str = "pt") -> tuple[nn.Linear, nn.Linear]:
    """A checkpoint with the two layers that BGE-M3 has beside its own."""
    tiny_checkpoint("XLMRobertaModel", folder)
    torch.manual_seed(1)
    weigh, narrow = nn.Linear(32, 1), nn.Linear(32, 24)
    for layer, name in ((weigh, "sparse_linear"), (narrow, "colbert_linear")):
        state = layer.state_dict()
        if form == "pt":
            torch.save(state, folder / f"{name}.pt")
        else:
            Later("safetensors.torch").save_file(state, folder / f"{name}.safetensors")
    return weigh, narrow
