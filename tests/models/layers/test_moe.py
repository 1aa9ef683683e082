"""Mixtures of experts are read in each way in which a checkpoint may store them, and cut over ranks."""

from pathlib import Path

import pytest
import torch
from drive import load_ranks
from safetensors.torch import load_file, save_file
from tiny import tiny_checkpoint
from torch import Tensor

from models.weight_slices import WeightsError


def in_one(folder: Path, count: int) -> None:
    """Store the experts of a checkpoint in one tensor for all of a layer."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    scopes = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    for scope in scopes:

        def all_of(name: str, scope: str = scope) -> Tensor:
            return torch.stack(
                [tensors.pop(f"{scope}.experts.{number}.{name}.weight") for number in range(count)]
            )

        gate, up, down = (all_of(f"{name}_proj") for name in ("gate", "up", "down"))
        tensors[f"{scope}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[f"{scope}.experts.down_proj"] = down
    assert scopes
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


@pytest.mark.parametrize("together", [False, True])
def test_ranks_read_the_pieces_that_they_hold(together: bool, read: list[int], tmp_path: Path) -> None:
    folder = tiny_checkpoint("Dots1ForCausalLM", tmp_path, num_key_value_heads=4)
    if together:
        in_one(folder, 6)
    whole = load_ranks(folder, 1)
    load_ranks(folder, 4)
    alone, *ranks = read
    assert len(whole) == 1
    assert len(ranks) == 4
    experts = 2 * 6 * 3 * 24 * 32 * 4  # bytes of two layers of six experts, which ranks divide
    assert max(ranks) < alone - experts * 3 // 4


def test_ranks_divide_the_width_of_experts(tmp_path: Path) -> None:
    folder = tiny_checkpoint("Qwen3MoeForCausalLM", tmp_path, moe_intermediate_size=25)
    with pytest.raises(ValueError, match="25 features of an expert cannot be divided evenly"):
        load_ranks(folder, 2)


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = tiny_checkpoint("MixtralForCausalLM", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightsError, match=r"layers\.1\.block_sparse_moe\.experts\.3\.w2\.weight is missing"):
        load_ranks(folder)


def test_experts_beyond_those_of_the_config_have_no_place(tmp_path: Path) -> None:
    folder = tiny_checkpoint("MixtralForCausalLM", tmp_path)
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"num_local_experts": 5', '"num_local_experts": 4'))
    with pytest.raises(WeightsError, match=r"gate\.weight .* has the shape \[5, 32\], not \[4, 32\]"):
        load_ranks(folder)
