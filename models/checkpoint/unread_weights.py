"""Weights that are passed over by name, never read: those of images beside text, MTP layers, unused scales.

Layers for multi-token prediction (MTP) serve to draft tokens. Qwen3-Next and MiMo call them `mtp` or
`mtp_layers`; DeepSeek, GLM and Step number them on after the last layer of the model, and config.json says
how many there are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from math import prod

import torch

from models.checkpoint.weights import Weights
from models.composites import COMPOSITES
from models.config import ModelConfig

_NAMED = re.compile(r"(?:.+?\.)?mtp(?:_\w+)?(?=\.)")
_NUMBERED = re.compile(r"(?:.+?\.)?layers\.(\d+)(?=\.)")

_ENDINGS = (*(f".{name}_scale" for name in ("q", "k", "v", "kv", "input", "output")), "activation_scale")
"""Layers of attention read those of the cache, and matrices in fp8 those of their inputs, if they have a use
for them."""
_OF_INPUTS = (".input_scale", "activation_scale")


def ignore_beside_text(weights: Weights, config: ModelConfig) -> int:
    """Leave the weights for images unread, and return the number of their bytes."""
    composite = COMPOSITES.get(config.architecture)
    if composite is None:
        return 0
    weights.ignore(*composite.beside)
    starts = tuple(f"{scope}." for scope in composite.beside)
    reading = weights.reading
    return sum(_size(weights, name) for name in reading.names if name.startswith(starts))


def _size(weights: Weights, name: str) -> int:
    shape, kind = weights.reading.stored_shape(name), weights.reading.stored_type(name)
    dtype = getattr(torch, kind or "", None)
    return prod(shape or ()) * (dtype.itemsize if isinstance(dtype, torch.dtype) else 1)


def ignore_scales_of_tensors(weights: Weights) -> Collection[str]:
    """Let all scales but those of weights go unread; returns the names of those of inputs."""
    names = [name for name in weights.reading.names if name.endswith(_ENDINGS)]
    weights.ignore(*names)
    return [name for name in names if name.endswith(_OF_INPUTS)]


def ignore_mtp(weights: Weights, config: ModelConfig) -> list[str]:
    """Leave these layers unread, and return the scopes in which they lie, such as "model.layers.61"."""
    scopes = sorted(set(_scopes(weights.reading.names, config)))
    weights.ignore(*scopes)
    return scopes


def _scopes(names: Iterable[str], config: ModelConfig) -> Iterator[str]:
    count = config.raw.get("num_nextn_predict_layers")
    extra = range(config.num_layers, config.num_layers + count if isinstance(count, int) else 0)
    for name in names:
        if named := _NAMED.match(name):
            yield named[0]
        elif (numbered := _NUMBERED.match(name)) and int(numbered[1]) in extra:
            yield numbered[0]
