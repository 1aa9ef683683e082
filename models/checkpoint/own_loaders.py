"""Reads checkpoints by loaders that a program or a plug-in has registered for values of --load-format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from models.weight_pieces import WeightsError


@dataclass(frozen=True)
class LoadConfig:
    """What a loader is made with, under vLLM's names."""

    load_format: str


@dataclass(frozen=True)
class LoadedModel:
    """What a loader is told of the model, under vLLM's names."""

    model: str
    """The path of the checkpoint's folder."""


class TensorCollector:
    """Stands for the model in which a loader loads: it keeps the tensors by their names in the checkpoint."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take tensors with the names that they have in the checkpoint; returns these names."""
        found = dict(weights)
        self.tensors.update(found)
        return set(found)


def load_tensors(loader: Callable[[LoadConfig], Any], folder: Path, load_format: str) -> Mapping[str, Tensor]:
    """All tensors that a loader finds in a folder. Raises WeightsError if it fails, or finds none."""
    collector = TensorCollector()
    try:
        loader(LoadConfig(load_format)).load_weights(collector, LoadedModel(str(folder)))
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise WeightsError(f"--load-format {load_format}: its loader failed for {folder}: {why}") from error
    if not collector.tensors:
        raise WeightsError(f"--load-format {load_format}: its loader has found no tensors in {folder}")
    return collector.tensors
