"""Checkpoints in fp8 have the logits that transformers computes from the numbers they mean."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drive import Driver, load_ranks
from packed import change_config
from safetensors.torch import load_file, save_file
from tiny import hf_logits, tiny_checkpoint
from torch import Tensor

from models.checkpoint.weights import WeightsError

PROMPT = [7, 80, 300, 12, 55, 9, 9]
SIDE = 48
"""The side of a block, which ends neither with a matrix nor with the piece of a rank."""
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [SIDE, SIDE]}
FLOATS = {"num_bits": 8, "type": "float"}


def compressed(**weights: object) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": FLOATS | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def of_blocks(plain: Tensor) -> Tensor:
    """The scale of each block, for each element [N, K]."""
    scales = torch.empty_like(plain)
    for row in range(0, plain.shape[0], SIDE):
        for column in range(0, plain.shape[1], SIDE):
            block = (slice(row, row + SIDE), slice(column, column + SIDE))
            scales[block] = plain[block].abs().max() / 448
    return scales


def of_rows(plain: Tensor) -> Tensor:
    return (plain.abs().amax(1, keepdim=True) / 448).expand_as(plain).clone()


def of_all(plain: Tensor) -> Tensor:
    return torch.full_like(plain, plain.abs().max().item() / 448)


Scales = Callable[[Tensor], Tensor]
CASES: dict[str, tuple[dict[str, object], Scales, str, Callable[[Tensor], Tensor]]] = {
    "DeepSeek's blocks": (BLOCKS, of_blocks, "weight_scale_inv", lambda x: x[::SIDE, ::SIDE]),
    "per tensor": ({"quant_method": "fp8"}, of_all, "weight_scale", lambda x: x[0, 0]),
    "FBGEMM's rows": ({"quant_method": "fbgemm_fp8"}, of_rows, "weight_scale", lambda x: x[:, :1]),
    "rows": (compressed(strategy="channel"), of_rows, "weight_scale", lambda x: x[:, :1]),
    "one": (compressed(strategy="tensor"), of_all, "weight_scale", lambda x: x[0, :1]),
    "blocks": (
        compressed(strategy="block", block_structure=[SIDE, SIDE]),
        of_blocks,
        "weight_scale",
        lambda x: x[::SIDE, ::SIDE],
    ),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden_size": 64, "intermediate_size": 112}
    return tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"), **shape)


def write_pair(llama: Path, folder: Path, name: str) -> tuple[Path, Path]:
    """Write the checkpoint in fp8, and the plain one that it means."""
    config, scales_of, named, stored = CASES[name]
    packed, plain = (shutil.copytree(llama, folder / each) for each in ("packed", "plain"))
    tensors = load_file(llama / "model.safetensors")
    small = dict(tensors)
    for key, tensor in tensors.items():
        if not key.endswith("_proj.weight"):
            continue
        scales = scales_of(tensor)
        small[key] = (tensor / scales).to(torch.float8_e4m3fn)
        small[f"{key.removesuffix('weight')}{named}"] = stored(scales).contiguous().clone()
        tensors[key] = small[key].float() * scales
    save_file(small, packed / "model.safetensors", {"format": "pt"})
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    change_config(packed, quantization_config=config)
    return packed, plain


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_plain_checkpoint(name: str, llama: Path, tmp_path: Path) -> None:
    packed, plain = write_pair(llama, tmp_path, name)
    expected = hf_logits(plain, PROMPT).log_softmax(-1)
    for ranks in (1, 2, 4):
        logits = Driver(load_ranks(packed, ranks)).step({0: PROMPT})[0]
        torch.testing.assert_close(logits.log_softmax(-1), expected, atol=1e-4, rtol=0)


def test_numbers_that_are_none_are_refused(llama: Path, tmp_path: Path) -> None:
    packed, _ = write_pair(llama, tmp_path, "rows")
    path, name = packed / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(path)
    tensors[name].view(torch.uint8)[3, 5] = 255
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(WeightsError, match=r"up_proj: 'weight' has numbers that are NaN"):
        load_ranks(packed)
