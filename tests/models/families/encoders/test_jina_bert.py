"""JinaBERT, which transformers does not have: against its formula, written out here, on random weights."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from drive import load_ranks
from encoded import TEXTS, Text, assert_near, run
from safetensors.torch import save_file
from tiny import write_tokenizer
from torch import Tensor

from models.config import ConfigError

SIZE, INNER, HEADS, LAYERS = 48, 40, 6, 2
CONFIG = {
    "architectures": ["JinaBertForMaskedLM"],
    "model_type": "bert",
    "vocab_size": 320,
    "hidden_size": SIZE,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "position_embedding_type": "alibi",
    "feed_forward_type": "geglu",
    "torch_dtype": "float32",
}
SLOPES = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
"""The slopes of four heads, and then every other one of eight heads."""


def checkpoint(folder: Path, **fields: object) -> dict[str, Tensor]:
    torch.manual_seed(1)
    tensors: dict[str, Tensor] = {}

    def linear(name: str, inputs: int, outputs: int, bias: bool = True) -> None:
        tensors[f"{name}.weight"] = torch.randn(outputs, inputs) / math.sqrt(inputs) * 2
        if bias:
            tensors[f"{name}.bias"] = torch.randn(outputs) * 0.1

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = 1 + torch.randn(SIZE) * 0.1
        tensors[f"{name}.bias"] = torch.randn(SIZE) * 0.1

    tensors["embeddings.word_embeddings.weight"] = torch.randn(320, SIZE)
    tensors["embeddings.token_type_embeddings.weight"] = torch.randn(2, SIZE)
    norm("embeddings.LayerNorm")
    for layer in range(LAYERS):
        scope = f"encoder.layer.{layer}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            linear(f"{scope}.attention.{name}", SIZE, SIZE)
        norm(f"{scope}.attention.output.LayerNorm")
        if "use_qk_norm" in fields:
            for name in (
                "attention.self.layer_norm_q",
                "attention.self.layer_norm_k",
                "layer_norm_1",
                "layer_norm_2",
            ):
                norm(f"{scope}.{name}")
            linear(f"{scope}.mlp.up_gated_layer", SIZE, 2 * INNER, bias=False)
            linear(f"{scope}.mlp.down_layer", INNER, SIZE)
            continue
        linear(f"{scope}.mlp.gated_layers", SIZE, 2 * INNER, bias=False)
        linear(f"{scope}.mlp.wo", INNER, SIZE)
        norm(f"{scope}.mlp.layernorm")
    linear("pooler.dense", SIZE, SIZE)  # for training
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **fields}))
    write_tokenizer(folder)
    return tensors


def hidden(w: dict[str, Tensor], text: Text, gate: Callable[[Tensor], Tensor]) -> Tensor:
    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, [SIZE], w[f"{name}.weight"], w[f"{name}.bias"], 1e-12)

    words, types = (w[f"embeddings.{name}_embeddings.weight"] for name in ("word", "token_type"))
    x = norm(words[list(text)] + types[0], "embeddings.LayerNorm")
    at = torch.arange(len(text))
    bias = -torch.tensor(SLOPES)[:, None, None] * (at[:, None] - at[None]).abs()
    for layer in range(LAYERS):
        scope = f"encoder.layer.{layer}"
        q, k, v = (linear(x, f"{scope}.attention.self.{name}") for name in ("query", "key", "value"))
        if normed := f"{scope}.layer_norm_1.weight" in w:
            q, k = (
                norm(each, f"{scope}.attention.self.layer_norm_{name}") for name, each in (("q", q), ("k", k))
            )
        q, k, v = (each.view(len(text), HEADS, -1).transpose(0, 1) for each in (q, k, v))
        odds = (q @ k.transpose(1, 2) / math.sqrt(SIZE // HEADS) + bias).softmax(-1)
        heads = (odds @ v).transpose(0, 1).flatten(1)
        given = x
        x = norm(linear(heads, f"{scope}.attention.output.dense") + x, f"{scope}.attention.output.LayerNorm")
        if normed:
            x = norm(x + given, f"{scope}.layer_norm_1")
            ups, gates = linear(x, f"{scope}.mlp.up_gated_layer").split(INNER, dim=-1)
            x = norm(linear(gate(gates) * ups, f"{scope}.mlp.down_layer") + x, f"{scope}.layer_norm_2")
            continue
        gates, ups = linear(x, f"{scope}.mlp.gated_layers").split(INNER, dim=-1)
        x = norm(linear(gate(gates) * ups, f"{scope}.mlp.wo") + x, f"{scope}.mlp.layernorm")
    return x


@pytest.mark.usefixtures("cpu_kernels", "threads")
@pytest.mark.parametrize(("kind", "gate"), [("geglu", F.gelu), ("reglu", F.relu)])
def test_hidden_states(tmp_path: Path, kind: str, gate: Callable[[Tensor], Tensor]) -> None:
    tensors = checkpoint(tmp_path, feed_forward_type=kind)
    expected = [hidden(tensors, text, gate) for text in TEXTS]
    assert_near(run(load_ranks(tmp_path), TEXTS), expected)
    assert_near(run(load_ranks(tmp_path, 2), TEXTS), expected)


@pytest.mark.usefixtures("cpu_kernels")
def test_norms_of_queries_and_keys(tmp_path: Path) -> None:
    tensors = checkpoint(tmp_path, use_qk_norm=True)
    assert_near(run(load_ranks(tmp_path), TEXTS), [hidden(tensors, text, F.gelu) for text in TEXTS])
    with pytest.raises(ConfigError, match="with one rank"):
        load_ranks(tmp_path, 2)


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, position_embedding_type="absolute")
    with pytest.raises(ConfigError, match="'position_embedding_type' is 'absolute', but must be 'alibi'"):
        load_ranks(tmp_path)
