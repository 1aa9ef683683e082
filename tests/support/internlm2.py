"""InternLM2's checkpoints, made of Llama's: its own class comes as code with them."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_NAMES = {
    "model.embed_tokens.": "model.tok_embeddings.",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "lm_head": "output",
}


def rewrite(folder: Path, tensors: dict[str, Tensor], **fields: object) -> None:
    """Other weights for a checkpoint, and other fields of its config.json."""
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def make_internlm2(llama: Path) -> Path:
    tensors = _renamed(load_file(llama / "model.safetensors"), kv_heads=2, head_dim=8)
    rewrite(llama, tensors, architectures=["InternLM2ForCausalLM"], model_type="internlm2", bias=False)
    return llama


def _renamed(tensors: dict[str, Tensor], kv_heads: int, head_dim: int) -> dict[str, Tensor]:
    """Llama's tensors under InternLM2's names, with q, k and v interleaved."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for old, new in _NAMES.items():
            name = name.replace(old, new)
        if "_proj" not in name:
            renamed[name] = tensor
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        q, k, v = (tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv")
        heads = [part.view(kv_heads, -1, head_dim, part.shape[-1]) for part in (q, k, v)]
        whole = torch.cat(heads, dim=1).flatten(0, 2).contiguous()
        renamed[name.replace("self_attn.q_proj", "attention.wqkv")] = whole
    return renamed
