"""Checkpoints in fp8 and mxfp4, and the plain ones that they mean; all that is used of torch is e4m3."""

from collections.abc import Callable
from pathlib import Path

import torch
from packed import write_both
from torch import Tensor

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
FLOAT_CASES: dict[str, tuple[dict[str, object], Scales, str, Callable[[Tensor], Tensor]]] = {
    "DeepSeek's blocks": (BLOCKS, of_blocks, "weight_scale_inv", lambda x: x[::SIDE, ::SIDE]),
    "per tensor": ({"quant_method": "fp8"}, of_all, "weight_scale", lambda x: x[0, 0]),
    "per tensor in two dimensions": (
        {"quant_method": "fp8"},
        of_all,
        "weight_scale",
        lambda x: x[:1, :1],
    ),
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


def write_floats(source: Path, folder: Path, name: str) -> tuple[Path, Path]:
    """Write a plain checkpoint in fp8, and the plain one that this means."""
    config, scales_of, named, kept = FLOAT_CASES[name]

    def change(key: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if not key.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            return None
        scales = scales_of(tensor)
        small = (tensor / scales).to(torch.float8_e4m3fn)
        stored = {key: small, f"{key.removesuffix('weight')}{named}": kept(scales).clone()}
        return stored, small.float() * scales

    return write_both(source, folder, config, change)


MX_GROUP = 32
MX = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": FLOATS | {"num_bits": 4, "strategy": "group", "group_size": MX_GROUP},
        }
    },
}


def write_mxfp4(source: Path, folder: Path) -> tuple[Path, Path]:
    """Write a plain checkpoint in mxfp4, and the plain one that this means.

    The largest number of a group is at most 6 times a power of two, as the format's document has it.
    """
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

    def change(key: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if not key.endswith("_proj.weight"):
            return None
        groups = tensor.float().unflatten(1, (-1, MX_GROUP))
        powers = groups.abs().amax(-1).clamp_min(2.0**-100).log2().floor() - 2
        steps = groups / 2 ** powers.unsqueeze(-1)
        codes = (steps.abs().unsqueeze(-1) - sizes).abs().argmin(-1)
        meant = sizes[codes] * steps.sign() * 2 ** powers.unsqueeze(-1)
        codes = (codes + 8 * (steps < 0)).flatten(1).to(torch.uint8)
        packed, scales = codes[:, ::2] | codes[:, 1::2] << 4, (powers + 127).to(torch.uint8)
        module = key.removesuffix("weight")
        stored = {f"{module}weight_packed": packed, f"{module}weight_scale": scales}
        return stored, meant.flatten(1).to(tensor.dtype)

    return write_both(source, folder, MX, change)
