"""Checkpoints that other libraries write or read mean here what they mean there.

The package compressed-tensors writes its own files and says which plain matrices they mean; those of fp8 are
read by transformers itself.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from drive import assert_logits
from later import Later
from packed import change_config, write_both
from safetensors.torch import load_file, save_file
from tiny import hf_logits, tiny_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

LIBRARY = Later("compressed_tensors.quantization")

PROMPT = [7, 80, 300, 12, 55, 9, 9]
SIDE = 32

WHOLE = "pack-quantized"
GROUPS = {"num_bits": 4, "strategy": "group", "group_size": SIDE}
FLOATS = {"num_bits": 8, "type": "float"}
MX = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
BLOCKS = {"strategy": "block", "block_structure": [SIDE, SIDE]}
CASES: dict[str, tuple[str, dict[str, object], int | None]] = {
    "W4A16": (WHOLE, GROUPS, None),
    "W4A16 with zero points": (WHOLE, GROUPS | {"symmetric": False}, None),
    "W4A16 by weight": (WHOLE, GROUPS | {"actorder": "weight"}, None),
    "W4A16 by group": (WHOLE, GROUPS | {"actorder": "group"}, None),
    "W4A16 by group with zero points": (WHOLE, GROUPS | {"actorder": "group", "symmetric": False}, None),
    "W8A16": (WHOLE, {"num_bits": 8, "strategy": "channel"}, None),
    "W4A8": (WHOLE, GROUPS, 8),
    "W8A8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, 8),
    "W8A8 per tensor": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}, 8),
    "W8A8 with zero points": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}, 8),
    "fp8 per tensor": ("float-quantized", FLOATS | {"strategy": "tensor"}, None),
    "fp8 by rows": ("float-quantized", FLOATS | {"strategy": "channel"}, None),
    "fp8 by blocks": ("float-quantized", FLOATS | BLOCKS, None),
    "mxfp4": ("mxfp4-pack-quantized", MX, None),
}
"""The format, the weights' arguments and the bits of inputs."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden_size": 64, "intermediate_size": 96}
    return tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"), **shape)


def scheme_of(name: str) -> tuple[str, Any]:
    format, weights, input_bits = CASES[name]
    rounded = {"num_bits": input_bits, "strategy": "token", "dynamic": True}
    inputs = None if input_bits is None else LIBRARY.QuantizationArgs(**rounded)
    scheme = LIBRARY.QuantizationScheme(
        targets=["Linear"],
        weights=LIBRARY.QuantizationArgs(**weights),
        input_activations=inputs,
        format=format,
    )
    return format, scheme


def measured(weight: Tensor, args: Any) -> dict[str, Tensor]:
    """The scales and zero points of a matrix, and with act-order the group of each input."""
    made: dict[str, Tensor] = {}
    inputs = weight.shape[1]
    match args.strategy:
        case "group":
            group_of = torch.arange(inputs) // SIDE
            if args.actorder == "group":
                group_of = group_of[torch.randperm(inputs, generator=torch.Generator().manual_seed(1))]
                made["weight_g_idx"] = group_of.int()
            groups = weight[:, group_of.argsort(stable=True)].unflatten(1, (-1, SIDE))
        case "block":
            blocks = weight.unflatten(0, (-1, SIDE)).unflatten(2, (-1, SIDE))
            groups = blocks.transpose(1, 2).flatten(2)
        case "channel":
            groups = weight.unsqueeze(1)
        case _:
            groups = weight.flatten().unsqueeze(0)
    scale, zero = LIBRARY.utils.calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    return {"weight": weight, "weight_scale": scale, "weight_zero_point": zero, **made}


@torch.compiler.set_stance("force_eager")  # it would compile a function for mxfp4
def write_library(llama: Path, folder: Path, name: str) -> tuple[Path, Path]:
    """Have the library compress a checkpoint, and decompress what it made."""
    format, scheme = scheme_of(name)
    compressor = Later("compressed_tensors.compressors").BaseCompressor.get_value_from_registry(format)

    def change(key: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if not key.endswith("_proj.weight"):
            return None
        made = compressor.compress(measured(tensor, scheme.weights), scheme)
        stored = {f"{key.removesuffix('weight')}{part}": value for part, value in made.items()}
        return stored, compressor.decompress(made, scheme)["weight"].contiguous()

    config = LIBRARY.QuantizationConfig(config_groups={"group_0": scheme}, format=format, ignore=["lm_head"])
    return write_both(llama, folder, json.loads(config.model_dump_json()), change)


@pytest.mark.parametrize("name", CASES)
def test_what_compressed_tensors_writes(name: str, llama: Path, tmp_path: Path) -> None:
    packed, plain = write_library(llama, tmp_path, name)
    assert_logits(packed, hf_logits(plain, PROMPT), PROMPT, 1, 2)


def write_blocks(llama: Path, folder: Path, block: tuple[int, int] | None) -> Path:
    """Write a checkpoint with a scale for each block, or for each matrix."""
    packed = shutil.copytree(llama, folder / "packed")
    tensors = load_file(packed / "model.safetensors")
    for key, tensor in list(tensors.items()):
        if key.endswith("_proj.weight"):
            rows, columns = block or tensor.shape
            blocks = tensor.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
            scales = blocks.abs().amax((1, 3)) / 448
            spread = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            tensors[key] = (tensor / spread).to(torch.float8_e4m3fn)
            tensors[f"{key}_scale_inv"] = scales if block else scales[0, 0].clone()
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    fields = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    change_config(packed, quantization_config=fields)
    return packed


@pytest.mark.parametrize("block", [(SIDE, SIDE), None], ids=["blocks", "per tensor"])
def test_what_transformers_reads_as_fp8(block: tuple[int, int] | None, llama: Path, tmp_path: Path) -> None:
    packed = write_blocks(llama, tmp_path, block)
    asked = FineGrainedFP8Config(weight_block_size=block, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.float32, quantization_config=asked)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    with torch.no_grad():
        expected = model.eval()(torch.tensor([PROMPT])).logits[0]
    assert_logits(packed, expected, PROMPT)
