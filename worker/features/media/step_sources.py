"""Encodes the sources that steps bring, whose keys and values layers write to blocks of their own."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

from models.config import ModelConfig
from models.layers.cross_attention import SourceInput, SourceModel, cross_layers
from models.model import ServedModel
from models.towers.blocks import segments
from models.towers.tower import InLayers, advance, finish
from worker.protocol import EncodeSource, StepInput


class StepSources:
    def __init__(self, model: SourceModel, block_size: int, target: torch.device, dtype: torch.dtype) -> None:
        self._model, self._block_size, self._target, self._dtype = model, block_size, target, dtype
        self._layers = encoder_layers(model)
        self._begun: InLayers[None] | None = None
        """The encoding of a source, of whose layers some are left:"""
        self._left = 0

    @torch.inference_mode()
    def update(self, step: StepInput) -> None:
        """Encode the sources of a step together, and of one that came partly the layers that it names."""
        if step.fresh:
            self._begun = None
        if whole := [each for each in step.sources if not each.partly]:
            finish(self._computation(whole))
        for each in step.sources:
            if each.partly:
                self._begun, self._left = self._computation([each]), self._layers
        if step.source_layers:
            self._go_on(step.source_layers)

    def _go_on(self, layers: int) -> None:
        if self._begun is None:
            raise ValueError("a step goes on with a source that none before it has begun")
        self._left -= layers
        advance(self._begun, layers if self._left > 0 else inf)
        if self._left <= 0:
            self._begun = None

    def _computation(self, sources: Sequence[EncodeSource]) -> InLayers[None]:
        step = segments([each.length for each in sources], self._target)
        places = torch.cat([self._places(each) for each in sources])
        step.slot_mapping, step.block_size = places.to(self._target), self._block_size
        return self._model.encode([self._on_device(each) for each in sources], step)

    def _places(self, source: EncodeSource) -> Tensor:
        """The places of the positions of a source."""
        size, blocks = self._block_size, torch.tensor(source.blocks, dtype=torch.int64)
        places = blocks.unsqueeze(1) * size + torch.arange(size)
        return places.flatten()[: source.length]

    def _on_device(self, source: EncodeSource) -> SourceInput:
        if source.features is None:
            return SourceInput(torch.tensor(source.tokens, device=self._target), None)
        bands, frames = self._model.source_shape
        half = len(source.features) == 2 * bands * frames
        values = torch.frombuffer(source.features.data, dtype=torch.float16 if half else torch.float32)
        features = values.view(bands, frames).to(self._target, self._dtype, copy=True)
        return SourceInput(None, features)


def encoder_layers(source: SourceModel) -> int:
    """The layers of an encoder behind each of which it may pause."""
    return sum(getattr(module, "pauses", False) for module in source.modules())


def encoder_bytes(source: SourceModel, config: ModelConfig, tokens: int, dtype: torch.dtype) -> int:
    """An upper bound of the bytes that an encoder takes in a step of so many tokens."""
    inner: Any = config.raw.get("encoder_ffn_dim") or config.raw.get("d_ff") or 4 * config.hidden_size
    return max(tokens, source.source_len) * (8 * config.hidden_size + 2 * inner) * dtype.itemsize


def block_bytes(model: ServedModel, block_size: int, dtype: torch.dtype) -> int:
    """The bytes of a block of sources in all layers."""
    shapes = [each.cache_shape(1, block_size, dtype) for each in cross_layers(model.modules())]
    return sum(torch.Size(shape).numel() for shape in shapes) * dtype.itemsize
