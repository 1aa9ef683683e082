"""Linear attention as llama.cpp's converter has it: value heads in turns of key heads, and minus e^A_log.

The checkpoint has the value heads of a key head side by side; the file has the first of each key head, then
the second of each. Heads are rows of projections, or columns of the last one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_NAMES = {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias"}


def stored_name(name: str) -> str | None:
    """The file's name of a tensor whose name ends otherwise than in a kind."""
    layer, _, end = name.partition(".linear_attn.")
    return f"blk.{layer.rpartition('.')[2]}.{_NAMES[end]}" if end in _NAMES else None


def as_in_file(name: str, tensor: Tensor, config: Mapping[str, int]) -> Tensor:
    """A tensor of a checkpoint as the file has it."""
    if ".linear_attn." not in name:
        return tensor
    tensor = -tensor.exp() if name.endswith("A_log") else tensor
    tensor = tensor.squeeze(1) if name.endswith("conv1d.weight") else tensor
    dim, order = _turns(name, config)
    return tensor if order is None else tensor.index_select(dim, order)


def from_file(name: str, tensor: Tensor, config: Mapping[str, int]) -> Tensor:
    """What a tensor of the file means, as the checkpoint has it."""
    if ".linear_attn." not in name:
        return tensor
    dim, order = _turns(name, config)
    tensor = tensor if order is None else tensor.index_select(dim, order.argsort())
    tensor = tensor.unsqueeze(1) if name.endswith("conv1d.weight") else tensor
    return tensor.neg().log() if name.endswith("A_log") else tensor


def _turns(name: str, config: Mapping[str, int]) -> tuple[int, Tensor | None]:
    """The dimension in which value heads lie, and their order in the file."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    heads = torch.arange(values).view(keys, -1).t().flatten()
    end = name.rpartition(".linear_attn.")[2].removesuffix(".weight")
    if end == "norm":
        return 0, None
    width = 1 if end in ("A_log", "dt_bias", "in_proj_a", "in_proj_b") else config["linear_value_head_dim"]
    order = (heads[:, None] * width + torch.arange(width)).flatten()
    if end in ("in_proj_qkv", "conv1d"):
        before = 2 * keys * config["linear_key_head_dim"]
        order = torch.cat([torch.arange(before), before + order])
    return int(end == "out_proj"), order
