"""Weights of a composite checkpoint that text does not need: they are passed over by name, never read."""

from __future__ import annotations

from math import prod

import torch

from models.checkpoint.weights import Weights
from models.config import ModelConfig
from models.conversion.composites import COMPOSITES


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
