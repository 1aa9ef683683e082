"""Latent attention as llama.cpp's converter writes it: now with the halves of a matrix, and before without.

Nothing of the code under test is used.
"""

import re
from collections.abc import Mapping
from typing import Any

from gguf_experts import Stack
from gguf_writer import F32, Typed
from torch import Tensor

_WHOLE = re.compile(r"model\.layers\.(\d+)\.self_attn\.kv_b_proj\.weight")


def latent_fields(config: Mapping[str, Any], *, joined: bool) -> dict[str, object]:
    """The fields of latent attention, without their prefix."""
    rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    widths = config["qk_nope_head_dim"] + turned, config["v_head_dim"]
    fields: dict[str, object] = {
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": turned,
        "leading_dense_block_count": config.get("first_k_dense_replace", config["num_hidden_layers"]),
        "expert_feed_forward_length": config.get("moe_intermediate_size", config["intermediate_size"]),
    }
    if config.get("q_lora_rank"):
        fields["attention.q_lora_rank"] = config["q_lora_rank"]
    if joined:
        fields |= dict(zip(("attention.key_length", "attention.value_length"), widths, strict=True))
    else:
        fields |= {"attention.head_count_kv": 1}
        fields |= {"attention.key_length": rank + turned, "attention.value_length": rank}
        fields |= dict(zip(("attention.key_length_mla", "attention.value_length_mla"), widths, strict=True))
    if "n_routed_experts" in config:
        fields["expert_weights_norm"] = bool(config["norm_topk_prob"])
        fields["expert_gating_func"] = 1 if "V2" in config["architectures"][0] else 2
    if sharper := config["rope_parameters"].get("mscale_all_dim"):
        fields["rope.scaling.yarn_log_multiplier"] = Typed(F32, 0.1 * sharper)
    return fields


def take_halves(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[set[str], list[Stack]]:
    """Find the matrices that are split: their names, and the halves, of which that of keys is turned."""
    taken: set[str] = set()
    stacks: list[Stack] = []
    for name, tensor in tensors.items():
        if match := _WHOLE.fullmatch(name):
            taken.add(name)
            heads = tensor.unflatten(0, (config["num_attention_heads"], -1))
            keys, values = heads.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
            stacks.append(Stack(f"blk.{match[1]}.attn_k_b.weight", [keys.transpose(1, 2)]))
            stacks.append(Stack(f"blk.{match[1]}.attn_v_b.weight", [values]))
    return taken, stacks
