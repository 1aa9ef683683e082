"""The tensors of Mistral's own files under the names that transformers has for them.

Rows of queries and keys lie there as pairs that are rotated together, 2 j and 2 j + 1 of a head; elsewhere a
pair is j and j + half a head.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from torch import Tensor

from models.checkpoint.files import Source, Stored
from models.config import ModelConfig
from models.weight_slices import Cut

_TOP = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_LAYER = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.gate": "block_sparse_moe.gate",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight")
_EXPERTS = "feed_forward.experts."
_ROTATED = ("attention.wq", "attention.wk")


def renamed(source: Source, config: ModelConfig) -> Source:
    """The same tensors, as a checkpoint of transformers would have them. Unknown names stay as they are."""
    found: dict[str, Stored] = {}
    for name, stored in source.tensors.items():
        layer = _LAYER.fullmatch(name)
        if layer is None:
            found[_TOP.get(name, name)] = stored
            continue
        number, module = layer.groups()
        if module in _ROTATED:
            stored = replace(stored, read=partial(_read_halves, stored, config.head_dim))
        own = module.replace(_EXPERTS, "block_sparse_moe.experts.") if module.startswith(_EXPERTS) else ""
        found[f"model.layers.{number}.{own or _OF_LAYER.get(module, module)}.weight"] = stored
    return Source(source.place, found)


def _read_halves(stored: Stored, head_dim: int, cut: Cut | None) -> Tensor:
    """Read a matrix [heads * head_dim, inputs], or whole heads of it, with pairs half a head apart."""
    rows = stored.read(cut)
    return rows.reshape(-1, head_dim // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
