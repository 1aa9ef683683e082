"""Tensors of quantized checkpoints that nothing here reads: scales of a cache in 8 bits, and of inputs."""

from __future__ import annotations

from collections.abc import Collection

from models.checkpoint.weights import Weights

_ENDINGS = (*(f".{name}_scale" for name in ("q", "k", "v", "kv", "input", "output")), "activation_scale")
"""The cache has the number type of the model, and inputs are rounded group by group, finer than is asked."""


def ignore_scales_of_tensors(weights: Weights) -> Collection[str]:
    """Let all scales but those of weights go unread; returns their names."""
    names = [name for name in weights.reading.names if name.endswith(_ENDINGS)]
    weights.ignore(*names)
    return names
