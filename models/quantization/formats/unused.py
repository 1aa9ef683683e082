"""Tensors of quantized checkpoints that need not be read: scales of a cache in 8 bits, and of inputs."""

from __future__ import annotations

from collections.abc import Collection

from models.checkpoint.weights import Weights

_ENDINGS = (*(f".{name}_scale" for name in ("q", "k", "v", "kv", "input", "output")), "activation_scale")
"""Layers of attention read those of the cache, and matrices in fp8 those of their inputs, if they have a use
for them."""
_OF_INPUTS = (".input_scale", "activation_scale")


def ignore_scales_of_tensors(weights: Weights) -> Collection[str]:
    """Let all scales but those of weights go unread; returns the names of those of inputs."""
    names = [name for name in weights.reading.names if name.endswith(_ENDINGS)]
    weights.ignore(*names)
    return [name for name in names if name.endswith(_OF_INPUTS)]
