"""Gemma 3n as it is published, beside pictures and sound too, what it is refused, and its sparse gates."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from drive import assert_logits, load_ranks
from safetensors.torch import load_file, save_file
from tiny import hf_logits, tiny_checkpoint

from models.config import ConfigError
from models.layers.mlp import SparseMLP
from models.parallel.parallel import Parallel

PROMPT = random.Random(2).choices(range(5, 300), k=19)
OLD_ROPES: dict[str, object] = {
    "rope_parameters": None,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": None,
}


def rewritten(folder: Path, **fields: object) -> Path:
    """The checkpoint with other fields of config.json."""
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    path.write_text(json.dumps(config | fields))
    return folder


def test_older_files_name_rotations_otherwise(tmp_path: Path) -> None:
    folder = tiny_checkpoint("Gemma3nForCausalLM", tmp_path)
    expected = hf_logits(folder, PROMPT)
    assert_logits(rewritten(folder, **OLD_ROPES), expected, PROMPT)


def test_tokens_without_vectors_have_those_of_the_first(tmp_path: Path) -> None:
    """Older transformers knows no such tokens, so that the whole table is compared."""
    folder = tiny_checkpoint("Gemma3nForCausalLM", tmp_path)
    path, name, prompt = (
        folder / "model.safetensors",
        "model.embed_tokens_per_layer.weight",
        [5, 300, 290, 20],
    )
    tensors = load_file(path)
    tensors[name][280:] = tensors[name][0]
    save_file(tensors, path, {"format": "pt"})
    expected = hf_logits(folder, prompt)
    save_file(tensors | {name: tensors[name][:280].clone()}, path)
    assert_logits(rewritten(folder, vocab_size_per_layer_input=280), expected, prompt)


def test_its_text_is_served_from_a_checkpoint_with_pictures_and_sound(tmp_path: Path) -> None:
    """transformers needs a package for its pictures, so that the composite is made of the text here."""
    folder = tiny_checkpoint("Gemma3nForCausalLM", tmp_path)
    expected = hf_logits(folder, PROMPT)
    path = folder / "model.safetensors"
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor for name, tensor in load_file(path).items()
    }
    beside = ("vision_tower.stem", "audio_tower.conv", "embed_vision.norm", "embed_audio.norm")
    save_file(tensors | {f"model.{name}.weight": torch.zeros(3) for name in beside}, path)
    text = json.loads((folder / "config.json").read_text())
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n"}
    (folder / "config.json").write_text(json.dumps(whole | {"text_config": text}))
    assert_logits(folder, expected, PROMPT, 1, 2)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"altup_active_idx": 3}, "'altup_active_idx' must be less than 'altup_num_inputs'"),
        ({"intermediate_size": [48, 48]}, "must have a number for each of the 6 layers"),
        ({"activation_sparsity_pattern": [1.0] * 6}, "Expected `float` < 1.0"),
        ({"num_kv_shared_layers": 6}, "layer 0 must read the cache of a layer before the last 6"),
        ({"use_bidirectional_attention": True}, "is not served with attention in both directions"),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, object], said: str, tmp_path: Path) -> None:
    folder = rewritten(tiny_checkpoint("Gemma3nForCausalLM", tmp_path), **fields)
    with pytest.raises(ConfigError, match=said):
        load_ranks(folder)


def test_the_part_of_gates_that_is_said_is_closed() -> None:
    mlp = SparseMLP(8, 20_000, Parallel(), activation="gelu_pytorch_tanh", sparsity=0.95)
    gates = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(0)) + 3
    ups = torch.ones_like(gates)
    mlp.gate_up_proj.forward = lambda x: torch.cat([gates, ups], dim=1)  # pyright: ignore
    mlp.down_proj.forward = lambda x: x  # pyright: ignore
    opened = (mlp(torch.zeros(2, 8)) != 0).float().mean(dim=1)
    torch.testing.assert_close(opened, torch.full((2,), 0.05), atol=0.005, rtol=0)
