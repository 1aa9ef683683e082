"""Encodes the sources that steps bring, whose keys and values layers write to blocks of their own."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, Literal, cast

import torch
from torch import Tensor

from models.config import ModelConfig
from models.layers.cross_attention import SourceInput, SourceModel, cross_layers
from models.model import ServedModel
from models.pooling.alignment import Alignment
from models.vision.blocks import segments
from models.vision.tower import InLayers, advance, finish
from worker.protocol import EncodeSource, StepInput
from worker.tables.sources import SourceTable


def find_source_model(model: ServedModel) -> SourceModel | None:
    """The part of a model that answers to sources, if there is one."""
    found = (each for each in model.modules() if getattr(each, "source_kind", ""))
    return cast("SourceModel | None", next(found, None))


def find_alignment(model: ServedModel) -> Alignment | None:
    """What compares texts with their sources, if the model has heads for it."""
    return getattr(find_source_model(model), "alignment", None)


def source_kind(model: ServedModel) -> Literal["", "tokens", "audio"]:
    """The kind of sources that a model reads."""
    source = find_source_model(model)
    return "" if source is None else source.source_kind


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


def encoder_layers(source: SourceModel | None) -> int:
    """The layers of an encoder behind each of which it may pause."""
    modules = () if source is None else source.modules()
    return sum(getattr(module, "pauses", False) for module in modules)


def open_sources(
    model: ServedModel, block_size: int, target: torch.device, dtype: torch.dtype
) -> StepSources | None:
    """What encodes the sources of steps; None if the model reads none."""
    source = find_source_model(model)
    return None if source is None else StepSources(source, block_size, target, dtype)


def open_table(model: ServedModel, slots: int, block_size: int, blocks: int) -> SourceTable | None:
    """The table of the sources of so many slots, which have so many blocks; None if the model reads none."""
    source = find_source_model(model)
    return None if source is None else SourceTable(slots + 1, source.source_len, block_size, blocks)


def encoder_bytes(model: ServedModel, config: ModelConfig, tokens: int, dtype: torch.dtype) -> int:
    """An upper bound of the bytes that an encoder takes in a step of so many tokens."""
    source = find_source_model(model)
    if source is None:
        return 0
    inner: Any = config.raw.get("encoder_ffn_dim") or config.raw.get("d_ff") or 4 * config.hidden_size
    return max(tokens, source.source_len) * (8 * config.hidden_size + 2 * inner) * dtype.itemsize


def count_blocks(source: SourceModel | None, block_size: int) -> int:
    """The blocks of the longest source."""
    return 0 if source is None else -(-source.source_len // block_size)


def block_bytes(model: ServedModel, block_size: int, dtype: torch.dtype) -> int:
    """The bytes of a block of sources in all layers."""
    shapes = [each.cache_shape(1, block_size, dtype) for each in cross_layers(model.modules())]
    return sum(torch.Size(shape).numel() for shape in shapes) * dtype.itemsize
