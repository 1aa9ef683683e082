"""Layers with states as llama.cpp's converter has them, and the fields that describe them.

Linear attention of Qwen3.5: the checkpoint has the value heads of a key head side by side; the file has the
first of each key head, then the second of each. Heads are rows of projections, or columns of the last one.
Nothing of the code under test is used.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gguf_experts import Stack
from gguf_writer import ARRAY, I32, Typed
from torch import Tensor

_NAMES = {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias", "D": "ssm_d", "expert_bias": "exp_probs_b.bias"}
_WITHOUT_KIND = re.compile(r"\w+\.layers\.(\d+)\.[\w.]+\.(A_log|dt_bias|D|expert_bias)")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_OF_MAMBA = (".mamba.", ".mixer.")


def stored_name(name: str) -> str | None:
    """The file's name of a tensor whose name ends otherwise than in a kind."""
    found = _WITHOUT_KIND.fullmatch(name)
    return f"blk.{found[1]}.{_NAMES[found[2]]}" if found else None


def as_in_file(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """A tensor of a checkpoint as the file has it."""
    tensor = tensor * _factors(name, tensor, config)
    tensor = -tensor.exp() if name.endswith("A_log") else tensor
    tensor = tensor.squeeze(1) if name.endswith(("conv1d.weight", "conv.conv.weight")) else tensor
    if any(scope in name for scope in _OF_MAMBA):
        if name.endswith(("A_log", ".D")):
            return tensor[:, None]
        groups = config.get("mamba_n_groups", config.get("n_groups"))
        return (
            tensor.view(groups, -1) if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")) else tensor
        )
    dim, order = _turns(name, config)
    return tensor if order is None else tensor.index_select(dim, order)


def from_file(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """What a tensor of the file means, as the checkpoint has it."""
    dim, order = _turns(name, config)
    tensor = tensor if order is None else tensor.index_select(dim, order.argsort())
    tensor = tensor.unsqueeze(1) if name.endswith(("conv1d.weight", "conv.conv.weight")) else tensor
    if any(scope in name for scope in _OF_MAMBA) and name.endswith(("A_log", ".D", ".norm.weight")):
        tensor = tensor.flatten()
    tensor = tensor.neg().log() if name.endswith("A_log") else tensor
    return tensor / _factors(name, tensor, config)


def _turns(name: str, config: Mapping[str, Any]) -> tuple[int, Tensor | None]:
    """The dimension in which value heads lie, or rows of q, k and v, and their order in the file."""
    if "query_key_value" in name:
        heads = config.get("n_head", config.get("num_attention_heads"))
        keys = heads if config["model_type"] == "bloom" else config["num_kv_heads"]
        keys = keys if config.get("new_decoder_architecture", True) else 1
        dim = config["hidden_size"] // heads
        rows = torch.arange((heads + 2 * keys) * dim).view(keys, -1, dim)
        return 0, torch.cat([rows[:, :-2].flatten(), rows[:, -2].flatten(), rows[:, -1].flatten()])
    end = name.rpartition(".linear_attn.")[2].removesuffix(".weight")
    if ".linear_attn." not in name or end == "norm" or config["model_type"] == "qwen3_next":
        return 0, None
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    heads = torch.arange(values).view(keys, -1).t().flatten()
    width = 1 if end in ("A_log", "dt_bias", "in_proj_a", "in_proj_b") else config["linear_value_head_dim"]
    order = (heads[:, None] * width + torch.arange(width)).flatten()
    if end in ("in_proj_qkv", "conv1d"):
        before = 2 * keys * config["linear_key_head_dim"]
        order = torch.cat([torch.arange(before), before + order])
    return int(end == "out_proj"), order


def _factors(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """The factors that the converter multiplies matrices of Falcon-H1 with, by rows."""
    factors = torch.ones(1)
    if config["model_type"] != "falcon_h1" or not name.endswith(".weight"):
        return factors
    of_input, of_gates = config["attention_in_multiplier"], config["mlp_multipliers"][0]
    ends = {
        "down_proj": config["mlp_multipliers"][1],
        "gate_proj": of_gates,
        "k_proj": of_input * config["key_multiplier"],
        "q_proj": of_input,
        "v_proj": of_input,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    end = name.split(".")[-2]
    if end != "in_proj":
        return factors * ends.get(end, 1.0)
    inner, shared = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    widths = torch.tensor([inner, inner, shared, shared, config["mamba_n_heads"]])
    factors = torch.tensor(config["ssm_multipliers"]) * config["ssm_in_multiplier"]
    return factors.repeat_interleave(widths)[:, None]


@dataclass(frozen=True)
class _Above(Stack):
    """Pieces of each head [heads, rows, width]: those of a kind lie one above the other."""

    @property
    def tensor(self) -> Tensor:
        return torch.cat([view.flatten(0, 1) for view in self.views])

    def write(self, meant: Tensor) -> None:
        sizes = [view.shape[0] * view.shape[1] for view in self.views]
        for view, part in zip(self.views, meant.split(sizes), strict=True):
            view.copy_(part.view(view.shape))


def take_pieces(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], *, joined: bool
) -> tuple[set[str], list[Stack]]:
    """Find the matrices that are taken apart, or called otherwise: their names, and what becomes of them.

    `joined`: as the first files of Qwen3-Next have them.
    """
    taken: set[str] = set()
    stacks: list[Stack] = []
    dense = config["model_type"] == "granitemoehybrid" and not config["num_local_experts"]
    for name, tensor in tensors.items():
        if (found := _LAYER.fullmatch(name)) is None:
            continue
        layer = f"blk.{found[1]}"
        if found[2] == "linear_attn.in_proj_qkvz.weight" and not joined:
            key, value = config["linear_key_head_dim"], config["linear_value_head_dim"]
            keys = config["linear_num_key_heads"]
            values = config["linear_num_value_heads"] // keys * value
            *mixed, gates = tensor.unflatten(0, (keys, -1)).split([key, key, values, values], dim=1)
            stacks += [
                _Above(f"{layer}.attn_qkv.weight", mixed),
                _Above(f"{layer}.attn_gate.weight", [gates]),
            ]
        elif dense and found[2] == "shared_mlp.input_linear.weight":
            gate, up = tensor.chunk(2)
            stacks += [Stack(f"{layer}.ffn_gate.weight", [gate]), Stack(f"{layer}.ffn_up.weight", [up])]
        elif dense and found[2] == "shared_mlp.output_linear.weight":
            stacks.append(Stack(f"{layer}.ffn_down.weight", [tensor]))
        else:
            continue
        taken.add(name)
    return taken, stacks


def state_fields(arch: str, config: Mapping[str, Any]) -> dict[str, object]:
    """The fields of layers with states, without their prefix."""
    key_heads, kinds = config.get("num_key_value_heads", 0), config.get("layer_types") or []
    fields: dict[str, object] = {}
    if arch in ("qwen35", "qwen35moe", "qwen3next"):
        fields["ssm.inner_size"] = config["linear_value_head_dim"] * config["linear_num_value_heads"]
        return fields | {"full_attention_interval": 4}
    if arch == "falcon-h1":
        return {"ssm.inner_size": config["mamba_d_ssm"]}
    if arch in ("lfm2", "lfm2moe"):
        inner = config["intermediate_size"]
        fields["feed_forward_length"] = 2 * inner // 3 if config.get("block_auto_adjust_ff_dim") else inner
        fields |= {"expert_gating_func": 2} if arch == "lfm2moe" else {}
    elif arch == "granitehybrid":
        fields["ssm.inner_size"] = config["mamba_expand"] * config["hidden_size"]
        fields["rope.scaling.finetuned"] = config.get("position_embedding_type") == "rope"
        fields["feed_forward_length"] = config["intermediate_size"]
        if not config["num_local_experts"]:
            fields["feed_forward_length"] = config["shared_intermediate_size"]
    else:
        kinds = config["layers_block_type"]
        fields["ssm.inner_size"] = config["mamba_num_heads"] * config["mamba_head_dim"]
        widths = {"mlp": config["intermediate_size"], "moe": config["moe_intermediate_size"]}
        fields["feed_forward_length"] = Typed(ARRAY, [widths.get(kind, 0) for kind in kinds], I32)
        fields |= {"expert_weights_norm": config["norm_topk_prob"]} if arch == "nemotron_h_moe" else {}
    by_layer = [key_heads if kind in ("full_attention", "attention") else 0 for kind in kinds]
    return fields | {"attention.head_count_kv": Typed(ARRAY, by_layer, I32)}
