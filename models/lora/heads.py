"""The head that an adapter brings: labels of texts or tokens, beside whatever its base does itself."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from models.checkpoint.files import read_safetensors
from models.lora.adapter_layers import not_finite
from models.lora.decision_head import read_decision_head
from models.lora_config import (
    MERGE,
    PREFIX,
    TENSORS_FILE,
    AdapterConfig,
    AdapterError,
    is_of_head,
    problem_type,
)
from models.plain_files import shown
from models.pooling.config import Activation
from models.pooling.task_heads import ACTIVATIONS, Every, Merged, TaskHead

_ACTIVATIONS: dict[str, Activation] = {"regression": "identity", "multi_label_classification": "sigmoid"}


def read_head(folder: Path, config: AdapterConfig, size: int, *, causal: bool) -> tuple[str, TaskHead] | None:
    """Read the head of an adapter for hidden states of this size -> its task and it, if there is one."""
    if config.decides:
        return "decide", read_decision_head(folder, size)
    if not config.head:
        return None
    classify = _classifier(folder, config, size, causal=causal)
    usual: Activation = "softmax" if config.labels > 1 else "sigmoid"
    is_for_tokens = config.task_type == "TOKEN_CLS"
    return "token_classify" if is_for_tokens else "classify", TaskHead(
        rows=Every() if is_for_tokens else Merged(("LAST" if causal else "CLS",)),
        project=classify,
        width=config.labels,
        activation=ACTIVATIONS[_ACTIVATIONS.get(problem_type(folder), usual)],
        activates=True,
    )


class _Classifier(nn.Module):
    """A function of hidden states [K, size] that gives [K, labels], all in float32."""

    def __init__(self, *layers: tuple[Tensor, Tensor | None]) -> None:
        """`layers`: weights and biases, between which is a tanh."""
        super().__init__()
        self.layers = nn.ModuleList()
        for weight, bias in layers:
            layer = nn.Linear(*weight.shape[::-1], bias=bias is not None, device="meta")
            given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
            layer.load_state_dict(given, assign=True)
            self.layers.append(layer.requires_grad_(False))

    def forward(self, rows: Tensor) -> Tensor:
        first, *others = self.layers
        rows = first(rows)
        for layer in others:
            rows = layer(rows.tanh())
        return rows


def _classifier(folder: Path, config: AdapterConfig, size: int, *, causal: bool) -> _Classifier:
    stored = read_safetensors(folder / TENSORS_FILE)
    found = {
        name.removeprefix(PREFIX).partition(f"{config.head}.")[2]: tensor.read(None).to(
            torch.float32, copy=True
        )
        for name, tensor in stored.items()
        if is_of_head(name.removeprefix(PREFIX))
    }
    if config.task_type != "TOKEN_CLS" and not causal and "out_proj.weight" not in found:
        raise AdapterError(
            f"{folder}: its {config.head} reads what a pooler makes of an encoder's first token, which is "
            f"not computed beside others: {MERGE}"
        )
    weight, bias = found.pop("weight", None), found.pop("bias", None)
    if weight is not None and not found:
        _check(folder, weight, bias, (config.labels, size))
        return _Classifier((weight, bias))
    inner, inner_bias, outer, outer_bias = (
        found.pop(f"{name}.{part}", None) for name in ("dense", "out_proj") for part in ("weight", "bias")
    )
    if inner is None or outer is None or found or weight is not None or bias is not None:
        names = ", ".join(map(shown, sorted(found))) or "these tensors"
        raise AdapterError(
            f"{folder}: its {config.head} is neither one matrix nor the layers dense and out_proj: {names}; "
            f"{MERGE}"
        )
    _check(folder, inner, inner_bias, (size, size))
    _check(folder, outer, outer_bias, (config.labels, size))
    return _Classifier((inner, inner_bias), (outer, outer_bias))


def _check(folder: Path, weight: Tensor, bias: Tensor | None, shape: tuple[int, int]) -> None:
    if tuple(weight.shape) != shape or (bias is not None and tuple(bias.shape) != shape[:1]):
        raise AdapterError(
            f"{folder}: a matrix of its head is {list(weight.shape)}, and {list(shape)} fits the model: "
            "serve the base on which it was trained"
        )
    if not all(each is None or bool(each.isfinite().all()) for each in (weight, bias)):
        raise not_finite(folder, "its head")
