"""Tiny drafters that read hidden states, as they are published, and what they guess, in plain torch.

Nothing of the code under test is used. The model that they guess for is transformers' own.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from shape_files import read_shapes
from tiny import VOCAB_SIZE, hf_model, tiny_checkpoint
from torch import Tensor

SIZE, INNER, HEADS, KV_HEADS = 32, 40, 4, 2
HEAD_DIM = SIZE // HEADS
LAYER = read_shapes("small")["drafter"]
GUESSABLE = 120
"""The tokens that EAGLE-3 can guess."""


def _matrices(inputs: int) -> dict[str, tuple[int, int]]:
    return {
        "self_attn.q_proj": (SIZE, inputs),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, inputs),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, inputs),
        "self_attn.o_proj": (SIZE, SIZE),
        "mlp.gate_proj": (INNER, SIZE),
        "mlp.up_proj": (INNER, SIZE),
        "mlp.down_proj": (SIZE, INNER),
    }


def _draw(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator)
        tensors[f"{name}.weight"] = 1 + 0.2 * drawn if len(shape) == 1 else 0.3 * drawn
    return tensors


def write_eagle3(folder: Path, *, speculators: bool = False, **fields: object) -> Path:
    """An EAGLE-3 checkpoint; `fields` of its config.json may differ."""
    names = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    layer = "layers.0" if speculators else "midlayer"
    shapes: dict[str, tuple[int, ...]] = {f"{layer}.{name}": (SIZE,) for name in names}
    shapes |= {f"{layer}.{name}": shape for name, shape in _matrices(2 * SIZE).items()}
    count = len(fields.get("eagle_aux_hidden_state_layer_ids", (0, 1, 2)))  # type: ignore[arg-type]
    shapes |= {"fc": (SIZE, count * SIZE), "norm": (SIZE,)}
    whole = fields.get("draft_vocab_size") is None
    tensors = _draw(shapes, 1)
    if not whole:
        chosen = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(2))[:GUESSABLE].sort()[0]
        tensors |= _draw({"lm_head": (GUESSABLE, SIZE)}, 3)
        tensors["d2t"] = chosen - torch.arange(GUESSABLE)
        tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, chosen, True)
    if fields.pop("own_embeddings", False):
        tensors |= _draw({"embed_tokens": (VOCAB_SIZE, SIZE)}, 4)
    if speculators:
        own: dict[str, object] = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": {**LAYER, "model_type": "llama"},
        }
    else:
        own = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    return _write(folder, {**own, "torch_dtype": "float32", **fields}, tensors)


def write_eagle(folder: Path, *, bias: bool = False) -> Path:
    shapes: dict[str, tuple[int, ...]] = {
        f"layers.0.{name}": shape for name, shape in _matrices(SIZE).items()
    }
    shapes |= {"layers.0.post_attention_layernorm": (SIZE,), "fc": (SIZE, 2 * SIZE)}
    tensors = _draw(shapes, 5)
    if bias:
        tensors["fc.bias"] = torch.linspace(-1, 1, SIZE)
    own = {**LAYER, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32"}
    return _write(folder, own, tensors)


def _write(folder: Path, config: dict[str, object], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def write_next_token(architecture: str, folder: Path) -> tuple[Path, Path]:
    """A checkpoint with a layer for MTP, and the model of transformers that has that layer as its last."""
    count = 3
    fields: dict[str, Any] = {"num_nextn_predict_layers": 1, "tie_word_embeddings": False}
    longer = tiny_checkpoint(architecture, folder / "longer", num_hidden_layers=count + 1, **fields)
    plain = tiny_checkpoint(architecture, folder / "plain", num_hidden_layers=count, **fields)
    both = shutil.copytree(plain, folder / "both")
    scope = f"model.layers.{count}"
    last = {name: x for name, x in load_file(longer / "model.safetensors").items() if name.startswith(scope)}
    shapes: dict[str, tuple[int, ...]] = {f"{scope}.{name}": (SIZE,) for name in ("enorm", "hnorm")}
    own = _draw({**shapes, f"{scope}.shared_head.norm": (SIZE,), f"{scope}.eh_proj": (SIZE, 2 * SIZE)}, 7)
    save_file(load_file(plain / "model.safetensors") | last | own, both / "model.safetensors")
    save_file(own, longer / "own.safetensors")
    return both, longer


def write_scoped_next_token(architecture: str, folder: Path) -> tuple[Path, Path]:
    """The same for families whose layer for MTP has attention, and lies in a scope of its own."""
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    longer = tiny_checkpoint(
        architecture, folder / "longer", num_hidden_layers=4, layer_types=[*kinds, "full_attention"]
    )
    plain = tiny_checkpoint(architecture, folder / "plain", num_hidden_layers=3, layer_types=kinds)
    both, scope = shutil.copytree(plain, folder / "both"), "model.layers.3."
    last = {
        name.replace(scope, "mtp.layers.0."): x
        for name, x in load_file(longer / "model.safetensors").items()
        if name.startswith(scope)
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"mtp.{name}": (SIZE,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    own = _draw({**shapes, "mtp.fc": (SIZE, 2 * SIZE)}, 7)
    save_file(load_file(plain / "model.safetensors") | last | own, both / "model.safetensors")
    save_file(own, longer / "own.safetensors")
    return both, longer


@dataclass
class NextTokenOracle:
    """A layer for MTP, as DeepSeek's paper has it, around transformers' own layer."""

    target: Any
    longer: Any
    weights: dict[str, Tensor]

    @classmethod
    def open(cls, longer: Path) -> NextTokenOracle:
        tensors = load_file(longer / "own.safetensors")
        layer = {name.removeprefix("model.layers.3."): x for name, x in tensors.items()}
        weights = {name.removesuffix(".weight"): x for name, x in layer.items()}
        return cls(hf_model(longer.parent / "plain"), hf_model(longer), weights)

    @torch.no_grad()
    def guesses(self, tokens: list[int], count: int) -> list[int]:
        """The likeliest tokens behind these, one after the other."""
        written = list(tokens)
        read = self.target(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0, :-1]
        for _ in range(count):
            hidden = self._hidden(written, read)[-1:]
            written.append(int(self.target.lm_head(self._before_head(hidden)).argmax()))
            read = torch.cat([read, hidden])
        return written[len(tokens) :]

    def _before_head(self, hidden: Tensor) -> Tensor:
        return _norm(hidden, self.weights["shared_head.norm"], self._eps)

    def _projected(self, embedded: Tensor, read: Tensor) -> Tensor:
        embedded = torch.cat([torch.zeros(1, SIZE), embedded[1:]])  # that of the first position is none
        both = [
            _norm(embedded, self.weights["enorm"], self._eps),
            _norm(read, self.weights["hnorm"], self._eps),
        ]
        return torch.cat(both, dim=-1) @ self.weights["eh_proj"].T

    def _hidden(self, tokens: list[int], read: Tensor) -> Tensor:
        embedded, length = self.target.get_input_embeddings()(torch.tensor(tokens[1:])), len(read)
        x = self._projected(embedded, read)[None]
        positions = torch.arange(length)[None]
        mask = torch.full((1, 1, length, length), -torch.inf).triu(1)
        turning = self.longer.model.rotary_emb(x, positions)
        out = self.longer.model.layers[-1](
            x, attention_mask=mask, position_ids=positions, position_embeddings=turning
        )
        return (out if isinstance(out, Tensor) else out[0])[0]

    @property
    def _eps(self) -> float:
        return self.target.config.rms_norm_eps


class ScopedNextTokenOracle(NextTokenOracle):
    """Qwen's, whose norms have weights around 0, and which passes on what it has normalised."""

    def _before_head(self, hidden: Tensor) -> Tensor:
        return hidden

    def _projected(self, embedded: Tensor, read: Tensor) -> Tensor:
        both = [self._normed(embedded, "pre_fc_norm_embedding"), self._normed(read, "pre_fc_norm_hidden")]
        return torch.cat(both, dim=-1) @ self.weights["mtp.fc"].T

    def _hidden(self, tokens: list[int], read: Tensor) -> Tensor:
        return self._normed(super()._hidden(tokens, read), "norm")

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return _norm(x, 1 + self.weights[f"mtp.{name}"], self._eps)


@dataclass
class Oracle:
    """A drafter in plain torch, and transformers' model for which it guesses."""

    target: Any
    weights: dict[str, Tensor]
    config: dict[str, Any]

    @classmethod
    def open(cls, target: Path, head: Path) -> Oracle:
        config = json.loads((head / "config.json").read_text())
        return cls(hf_model(target), load_file(head / "model.safetensors"), config)

    def guesses(self, tokens: list[int], count: int) -> list[int]:
        """The likeliest tokens behind these, one after the other."""
        written = list(tokens)
        read = self.read(tokens)[:-1]
        for _ in range(count):
            hidden = self.hidden(written, read)
            written.append(int(self.logits(hidden[-1:]).argmax()))
            read = torch.cat([read, hidden[-1:]])
        return written[len(tokens) :]

    @torch.no_grad()
    def read(self, tokens: list[int]) -> Tensor:
        """What is read of the model's tokens [T, SIZE]."""
        out = self.target(torch.tensor([tokens]), output_hidden_states=True)
        if not self.is_eagle3:
            return out.hidden_states[-1][0]
        layers = len(out.hidden_states) - 1
        ids = self.config.get("eagle_aux_hidden_state_layer_ids", (2, layers // 2, layers - 3))
        streams = [out.hidden_states[layer][0] for layer in ids]
        return torch.cat(streams, dim=-1) @ self.weights["fc.weight"].T

    @torch.no_grad()
    def hidden(self, tokens: list[int], read: Tensor) -> Tensor:
        """The results [T - 1, SIZE] for all tokens but the first, of what was read of those before them."""
        embeddings = self.weights.get("embed_tokens.weight", self.target.get_input_embeddings().weight)
        embedded = embeddings[torch.tensor(tokens[1:])]
        w = {
            name.partition("layer")[2].partition(".")[2].removeprefix("0."): x
            for name, x in self.weights.items()
        }
        if not self.is_eagle3:
            x = torch.cat([embedded, read], dim=-1) @ self.weights["fc.weight"].T
            x = stream = x + self.weights.get("fc.bias", torch.zeros(SIZE))
        else:
            normed = _norm(read, w["hidden_norm.weight"])
            stream = normed if self.config.get("norm_before_residual") else read
            x = torch.cat([_norm(embedded, w["input_layernorm.weight"]), normed], dim=-1)
        stream = stream + _attend(x, w)
        x = _norm(stream, w["post_attention_layernorm.weight"])
        gated = torch.nn.functional.silu(x @ w["mlp.gate_proj.weight"].T) * (x @ w["mlp.up_proj.weight"].T)
        return stream + gated @ w["mlp.down_proj.weight"].T

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [R, VOCAB_SIZE] of what follows."""
        if self.is_eagle3:
            hidden = _norm(hidden, self.weights["norm.weight"])
        if "lm_head.weight" not in self.weights:
            return self.target.get_output_embeddings()(hidden)
        logits = torch.full((len(hidden), VOCAB_SIZE), -torch.inf)
        tokens = torch.arange(GUESSABLE) + self.weights["d2t"]
        logits[:, tokens] = hidden @ self.weights["lm_head.weight"].T
        return logits

    @property
    def is_eagle3(self) -> bool:
        return "norm.weight" in self.weights


def _norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def _attend(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """Causal attention over rows [T, F], which are turned by their numbers."""
    heads = [(x @ w[f"self_attn.{name}_proj.weight"].T).view(len(x), -1, HEAD_DIM) for name in "qkv"]
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    q, k = (_turn(each, angles[:, None]) for each in heads[:2])
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (k, heads[2]))
    scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    return out @ w["self_attn.o_proj.weight"].T


def _turn(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)
