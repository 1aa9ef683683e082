"""The least that a work can take on a machine: its operations and its bytes, at the rates of `machine.py`.

Counted are the products of matrices, those of attention and of the delta rule among them, and of a decode
step also the bytes of weights, of cached keys and values and of states. Everything else would have to cost
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from work import Case, Model

NAME = "floor"
ABOUT = (
    "no server, but what products of matrices and the bytes of weights and cache take at least, at the rates "
    "at which this machine multiplied in registers and read memory in the same round"
)
_BYTES = {"bfloat16": 2, "float32": 4}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_RATES = {"bfloat16": "bf16_tflop_s", "float32": "fp32_tflop_s"}


@dataclass(frozen=True)
class Shape:
    layers: int
    """The layers with attention."""
    width: int
    """The width of all heads together."""
    kv_width: int
    linear: int
    """Elements of the matrices that every token is multiplied with."""
    head: int
    """Elements of the matrix that tokens are chosen by."""
    routed: int = 0
    """Elements of the matrices of all experts, of which each token takes some."""
    chosen: float = 0.0
    """The part of the experts that a token takes."""
    states: int = 0
    """Numbers of a sequence's states in all layers together, which are float32."""

    @classmethod
    def read(cls, folder: Path) -> Shape:
        """Reads the sizes of a checkpoint in one file, whose embeddings are also its output matrix."""
        config = json.loads((folder / "config.json").read_text())
        with (folder / "model.safetensors").open("rb") as file:
            tensors = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        sizes = {name: about["shape"] for name, about in tensors.items() if "shape" in about}
        routed = {name: prod(size) for name, size in sizes.items() if _is_routed(name, size)}
        matrices = {name: prod(size) for name, size in sizes.items() if len(size) == 2 and name not in routed}
        experts = next((config[name] for name in _EXPERTS if name in config), 1)
        heads = config["num_attention_heads"]
        head = config.get("head_dim") or config["hidden_size"] // heads
        linear = config.get("layer_types", []).count("linear_attention")
        return cls(
            layers=config["num_hidden_layers"] - linear,
            states=linear * _state_of_layer(config) if linear else 0,
            width=heads * head,
            kv_width=config.get("num_key_value_heads", heads) * head,
            linear=sum(size for name, size in matrices.items() if "layer" in name),
            head=config["vocab_size"] * config["hidden_size"],
            routed=sum(routed.values()),
            chosen=config.get("num_experts_per_tok", 0) / experts,
        )

    @property
    def multiplied(self) -> float:
        """Elements of matrices and states of all layers that a token is multiplied with."""
        # A state is scaled (half of a product), read by the key, written by it and read by the query.
        return self.linear + self.routed * self.chosen + 3.5 * self.states

    def touched(self, rows: int) -> float:
        """Elements of these matrices that so many tokens read, if they choose their experts evenly."""
        return self.linear + self.routed * (1 - (1 - self.chosen) ** rows)


class Floor:
    def __init__(self, shape: Shape, model: Model, machine: Mapping[str, Any]) -> None:
        self._shape = shape
        self._number_bytes = _BYTES[model.dtype]
        self._operations_a_second = 1e12 * machine[_RATES[model.dtype]]
        self._bytes_a_second = 1e9 * machine["read_gb_s"]

    def values(self, case: Case) -> dict[str, object]:
        """The figures that the load generator would find if the machine did this work at its rates."""
        if case.texts is not None:
            return self._embed(*case.texts, case.concurrency)
        read, written = case.fields["random_input_len"], case.fields["random_output_len"]
        return self._generate(read, written, case.concurrency)

    def _generate(self, read: int, written: int, at_once: int) -> dict[str, object]:
        shape = self._shape
        # a token attends to half of the prompt, on average
        prompt = self._multiply(read * (shape.multiplied + self._attention(read / 2)) + shape.head)
        step = self._step(at_once, read + written / 2)
        whole = at_once * prompt + (written - 1) * step
        values: dict[str, object] = {"output_tokens_per_second": at_once * written / whole}
        if at_once == 1:  # else they depend on which goes first
            values |= {"ttft_ms": 1e3 * prompt, "tpot_ms": 1e3 * step}
        return {"concurrency": at_once, **values}

    def _embed(self, tokens: int, texts: int, at_once: int) -> dict[str, object]:
        text = self._multiply(tokens * (self._shape.multiplied + self._attention(tokens)))
        return {
            "concurrency": at_once,
            "inputs_per_second": 1 / text,
            "e2el_ms": 1e3 * text * texts * at_once,
        }

    def _step(self, rows: int, context: float) -> float:
        shape = self._shape
        elements = shape.touched(rows) + shape.head + rows * context * shape.layers * 2 * shape.kv_width
        nbytes = self._number_bytes * elements + 2 * 4 * rows * shape.states  # read, and written
        multiplied = self._multiply(rows * (shape.multiplied + shape.head + self._attention(context)))
        return max(nbytes / self._bytes_a_second, multiplied)

    def _attention(self, context: float) -> float:
        """Operations of a token's products with keys and with values, in all layers."""
        return 2 * self._shape.layers * self._shape.width * context

    def _multiply(self, products: float) -> float:
        """Operations of the products: each is a multiplication and a sum."""
        return 2 * products / self._operations_a_second


def _is_routed(name: str, size: list[int]) -> bool:
    return (len(size) == 3 and "conv" not in name) or ".experts." in name


def _state_of_layer(config: Mapping[str, Any]) -> int:
    heads: int = config["linear_num_value_heads"]
    return heads * config["linear_key_head_dim"] * config["linear_value_head_dim"]
