"""Models whose shapes are measured: their configs, and checkpoints of random weights in these shapes."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_FILE_BYTES = 2 << 30
"""Bytes after which a checkpoint's next file begins."""

_METADATA = {"format": "pt"}

INT4 = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


@dataclass(frozen=True)
class Shape:
    """A model of the family Llama, Qwen3 or BERT."""

    name: str
    family: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_dim: int
    tied: bool = True
    longest: int = 40_960

    @property
    def layer_numbers(self) -> int:
        """Numbers of a layer's matrices."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + (2 if self.family == "bert" else 3) * self.hidden * self.inner

    @property
    def body(self) -> int:
        """Numbers of all layers' matrices: those that every token is multiplied with."""
        return self.layers * self.layer_numbers

    @property
    def head(self) -> int:
        """Numbers of the matrix that makes logits."""
        return self.vocabulary * self.hidden

    def cached(self, itemsize: int = 2) -> int:
        """Bytes of a token in the cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def config(self) -> dict[str, Any]:
        fields = {
            "torch_dtype": "bfloat16",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.longest,
        }
        if self.family == "bert":
            names = {"architectures": ["BertModel"], "model_type": "bert"}
            return {**fields, **names, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2}
        names = {
            "architectures": [f"{'Llama' if self.family == 'llama' else 'Qwen3'}ForCausalLM"],
            "model_type": self.family,
            "bos_token_id": None,
            "eos_token_id": 2,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 5e5,
            "tie_word_embeddings": self.tied,
        }
        return {**fields, **names}

    def write(self, folder: Path, quantization: dict[str, Any] | None = None) -> Path:
        """Write the files of a checkpoint that has no weights; the tokenizer is the demo model's."""
        folder.mkdir(parents=True, exist_ok=True)
        fields = self.config() | ({} if quantization is None else {"quantization_config": quantization})
        (folder / "config.json").write_text(json.dumps(fields))
        for name in _TOKENIZER:
            shutil.copy(ROOT / "models" / "demo" / name, folder / name)
        return folder

    def write_weights(self, folder: Path, target: torch.device) -> int:
        """Add random weights in bfloat16, which are drawn on the device; returns their bytes."""
        from safetensors.torch import save_file

        held: dict[str, torch.Tensor] = {}
        files = written = 0
        for name, shape in self._tensors():
            held[name] = _draw(name, shape, target)
            if sum(tensor.nbytes for tensor in held.values()) >= _FILE_BYTES:
                save_file(held, folder / f"model-{files:05}.safetensors", _METADATA)
                written += sum(tensor.nbytes for tensor in held.values())
                files, held = files + 1, {}
        last = f"model-{files:05}.safetensors" if files else "model.safetensors"
        save_file(held, folder / last, _METADATA)
        return written + sum(tensor.nbytes for tensor in held.values())

    def _tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The names and shapes of the weights of a model that generates."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            for name, width in (("q", queries), ("k", keys), ("v", keys)):
                yield f"{at}.self_attn.{name}_proj.weight", (width, self.hidden)
            yield f"{at}.self_attn.o_proj.weight", (self.hidden, queries)
            if self.family == "qwen3":
                yield f"{at}.self_attn.q_norm.weight", (self.head_dim,)
                yield f"{at}.self_attn.k_norm.weight", (self.head_dim,)
            yield f"{at}.mlp.gate_proj.weight", (self.inner, self.hidden)
            yield f"{at}.mlp.up_proj.weight", (self.inner, self.hidden)
            yield f"{at}.mlp.down_proj.weight", (self.hidden, self.inner)
            yield f"{at}.input_layernorm.weight", (self.hidden,)
            yield f"{at}.post_attention_layernorm.weight", (self.hidden,)
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocabulary, self.hidden)


def _draw(name: str, shape: tuple[int, ...], target: torch.device) -> torch.Tensor:
    """Weights as a trained model might have them: rows keep their size from layer to layer."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    drawn = torch.randn(shape, device=target, dtype=torch.bfloat16)
    return (drawn * (1.0 if "embed" in name else shape[1] ** -0.5)).cpu()


def shallow(shape: Shape, layers: int) -> Shape:
    """The same model with fewer layers."""
    return replace(shape, layers=min(layers, shape.layers))


HYBRIDS: dict[str, dict[str, Any]] = {
    "delta rule": {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"},
    "scan": {
        "architectures": ["BambaForCausalLM"],
        "model_type": "bamba",
        "mamba_n_heads": 32,
        "mamba_d_state": 128,
        "attn_layer_indices": [1],
    },
}
"""What configs of hybrids have beside the fields of a decoder: layers with states, and one with attention."""


def write_hybrid(folder: Path, name: str, shape: Shape) -> Path:
    """Write the config of a hybrid of few layers, whose other sizes are those of a shape."""
    fields = shape.config() | {"num_hidden_layers": 4} | HYBRIDS[name]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


SHAPES = {
    "8B": Shape("8B", "llama", 4096, 14_336, 32, 32, 8, 128_256, 128, tied=False),
    "0.6B": Shape("0.6B", "qwen3", 1024, 3072, 28, 16, 8, 151_936, 128),
    "MiniLM": Shape("MiniLM", "bert", 384, 1536, 6, 12, 12, 30_522, 32, longest=512),
}
"""Llama-3.1-8B, Qwen3-0.6B and all-MiniLM-L6-v2."""

TINY = {
    "8B": Shape("8B", "llama", 64, 96, 2, 4, 2, 2304, 16, tied=False),
    "0.6B": Shape("0.6B", "qwen3", 64, 96, 2, 4, 2, 2304, 16),
    "MiniLM": Shape("MiniLM", "bert", 32, 64, 2, 2, 2, 2304, 16, longest=512),
}
"""Models of the same families that a CPU computes at once, under the same names."""
