"""Reads checkpoints by loaders that a program or a plug-in has registered for values of --load-format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from models.weight_slices import WeightsError


def load_tensors(loader: Callable[[Any], Any], folder: Path, load_format: str) -> Mapping[str, Tensor]:
    """All tensors that a loader finds in a folder, as vLLM's loaders are called. Raises WeightsError."""
    tensors: dict[str, Tensor] = {}

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        found = dict(weights)
        tensors.update(found)
        return set(found)

    model, place = SimpleNamespace(load_weights=load_weights), SimpleNamespace(model=str(folder))
    try:
        loader(SimpleNamespace(load_format=load_format)).load_weights(model, place)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise WeightsError(f"--load-format {load_format}: its loader failed for {folder}: {why}") from error
    if not tensors:
        raise WeightsError(f"--load-format {load_format}: its loader has found no tensors in {folder}")
    return tensors
