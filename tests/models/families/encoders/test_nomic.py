"""Nomic's own config.json, its scaled rotary positions, and its experts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drive import load_ranks
from encoded import TEXTS, Text, assert_near, hf_hidden, run
from safetensors.torch import load_file, save_file
from tiny import tiny_checkpoint
from torch import Tensor

from models.config import ConfigError, read_config

NOMIC = {
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 3,
    "n_inner": 48,
    "n_positions": 64,
    "activation_function": "swiglu",
    "layer_norm_epsilon": 1e-12,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_scaling_factor": None,
    "max_trained_positions": 16,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "type_vocab_size": 2,
}
"""The config.json of nomic-embed-text-v1.5, made small."""


def test_nomics_own_config(tmp_path: Path) -> None:
    folder = tiny_checkpoint("NomicBertModel", tmp_path)
    expected = [hf_hidden(folder, text) for text in TEXTS]
    replace_config(folder, NOMIC)
    assert read_config(folder).max_len == 16
    assert_near(run(load_ranks(folder), TEXTS), expected)


def test_nomic_turns_long_texts_slower(tmp_path: Path) -> None:
    """The rope type "dynamic" of transformers does the same; it too goes by the length of the text."""
    folder = tiny_checkpoint(
        "NomicBertModel",
        tmp_path,
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0},
    )
    expected = [hf_hidden(folder, text) for text in TEXTS]
    usual = tiny_checkpoint("NomicBertModel", tmp_path / "usual")
    is_turned = [
        not torch.allclose(a, hf_hidden(usual, text)) for a, text in zip(expected, TEXTS, strict=True)
    ]
    assert is_turned == [len(text) > 16 for text in TEXTS]
    replace_config(folder, NOMIC | {"rotary_scaling_factor": 2})
    assert read_config(folder).max_len == 64
    assert_near(run(load_ranks(folder), TEXTS), expected)


@pytest.mark.parametrize("name", ["prenorm", "rotary_emb_interleaved", "use_rms_norm"])
def test_what_nomics_code_could_do_and_we_do_not(name: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint("NomicBertModel", tmp_path)
    replace_config(folder, NOMIC | {name: True})
    with pytest.raises(ConfigError, match=f"{name}' is set, which is not served"):
        load_ranks(folder)


def replace_config(folder: Path, config: dict[str, Any]) -> None:
    fields = {"architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": 320, **config}
    (folder / "config.json").write_text(json.dumps(fields))


# Nomic's experts, which transformers does not have: against the formula, written out below


@pytest.mark.usefixtures("cpu_kernels", "threads")
def test_nomics_experts(tmp_path: Path) -> None:
    folder = tiny_checkpoint("NomicBertModel", tmp_path)
    tensors = with_experts(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors")
    experts = {"num_experts": 4, "moe_top_k": 2, "moe_every_n_layers": 2, "activation_function": "gelu"}
    biases = {"qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True}
    replace_config(folder, NOMIC | experts | biases)
    hidden = run(load_ranks(folder), TEXTS)
    assert_near(hidden, [nomic_moe(tensors, text) for text in TEXTS])
    for text, rows in zip(TEXTS, hidden, strict=True):
        assert torch.equal(run(load_ranks(folder), [text])[0], rows)
    assert_near(run(load_ranks(folder, 2), TEXTS), hidden)


def with_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return 0.3 * torch.randn(shape, generator=generator)

    stored = {name: tensor for name, tensor in tensors.items() if ".mlp." not in name}
    for layer in range(3):
        at = f"encoder.layers.{layer}"
        stored |= {f"{at}.attn.Wqkv.bias": draw(96), f"{at}.attn.out_proj.bias": draw(32)}
        if layer == 1:
            stored |= {f"{at}.mlp.router.layer.weight": draw(4, 32), f"{at}.mlp.experts.bias": draw(32)}
            stored |= {f"{at}.mlp.experts.mlp.{name}": draw(4 * 48, 32) for name in ("w1", "w2")}
        else:
            stored |= {f"{at}.mlp.fc1.weight": draw(48, 32), f"{at}.mlp.fc1.bias": draw(48)}
            stored |= {f"{at}.mlp.fc2.weight": draw(32, 48), f"{at}.mlp.fc2.bias": draw(32)}
    return stored


def nomic_moe(tensors: dict[str, Tensor], text: Text) -> Tensor:
    """The hidden states of one text in float64, token by token where tokens are routed."""
    w = {name: tensor.double() for name, tensor in tensors.items()}

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (32,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-12)

    def experts(x: Tensor, at: str) -> Tensor:
        odds = (w[f"{at}.router.layer.weight"] @ x).softmax(0)
        w1, w2 = (w[f"{at}.experts.mlp.{name}"].view(4, 48, 32) for name in ("w1", "w2"))
        best = odds.sort(descending=True).indices[:2]
        return sum(odds[e] * (F.gelu(w1[e] @ x) @ w2[e]) for e in best) + w[f"{at}.experts.bias"]

    angles = torch.arange(len(text)).outer(1000.0 ** (-torch.arange(0, 8, 2) / 8)).double()  # [L, 4]
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rotate(x: Tensor) -> Tensor:
        turned = torch.complex(*x.view(-1, 4, 8).chunk(2, dim=-1)) * turn
        return torch.cat([turned.real, turned.imag], dim=-1).transpose(0, 1)  # [heads, L, 8]

    words = w["embeddings.word_embeddings.weight"][list(text)]
    x = norm(words + w["embeddings.token_type_embeddings.weight"][0], "emb_ln")
    for layer in range(3):
        at = f"encoder.layers.{layer}"
        q, k, v = linear(x, f"{at}.attn.Wqkv").chunk(3, dim=-1)
        scores = rotate(q) @ rotate(k).transpose(1, 2) / 8**0.5
        heads = scores.softmax(-1) @ v.view(-1, 4, 8).transpose(0, 1)
        x = norm(x + linear(heads.transpose(0, 1).flatten(1), f"{at}.attn.out_proj"), f"{at}.norm1")
        if layer == 1:
            mlp = torch.stack([experts(row, f"{at}.mlp") for row in x])
        else:
            mlp = linear(F.gelu(linear(x, f"{at}.mlp.fc1")), f"{at}.mlp.fc2")
        x = norm(x + mlp, f"{at}.norm2")
    return x.float()
