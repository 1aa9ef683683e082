"""Cases beyond the table of families: the oldest checkpoints, and the end of the learned positions."""

from pathlib import Path

import pytest
import torch
from drive import Driver, load_ranks
from safetensors.torch import load_file, save_file
from tiny import hf_logits, tiny_checkpoint

from models.config import ConfigError, read_config
from models.loader import LoadOptions, load_model

PROMPT = [7, 200, 31, 99, 5, 310]


def test_gpt2_as_it_was_first_published(tmp_path: Path) -> None:
    """Such checkpoints hold the trunk alone, without its name, and the causal mask among the weights."""
    folder = tiny_checkpoint("GPT2LMHeadModel", tmp_path)
    expected = hf_logits(folder, PROMPT)
    path = folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    for layer in range(3):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 512, 512).tril()
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, path)
    logits = Driver(load_ranks(folder)).step({0: PROMPT})[0]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "OPTForCausalLM"])
def test_the_last_learned_position(tmp_path: Path, architecture: str) -> None:
    folder = tiny_checkpoint(architecture, tmp_path)
    prompt = [token % 300 + 5 for token in range(512)]
    logits = Driver(load_ranks(folder), sequences=1, max_len=512).step({0: prompt})[0]
    torch.testing.assert_close(logits, hf_logits(folder, prompt), atol=1e-4, rtol=0)
    with pytest.raises(
        ValueError, match="has learned 512 positions, and cannot serve 513: lower --max-model-len"
    ):
        load_ranks(folder, max_len=513)


def test_a_wrong_field_is_named(tmp_path: Path) -> None:
    folder = tiny_checkpoint("OPTForCausalLM", tmp_path)
    config = read_config(folder, {"ffn_dim": "wide"})
    with pytest.raises(ConfigError, match=r"config\.json of this OPTForCausalLM: .*\$\.ffn_dim"):
        load_model(LoadOptions(config, folder, dtype=torch.float32))
