"""Sources as a feature: what an encoder reads, and answers attend to, in blocks of their own.

Where there are sources, memory is divided as one longest sequence needs both kinds of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import msgspec
import torch
from torch import Tensor

from models.context import ForwardContext
from models.layers.cross_attention import SourceModel, cross_layers
from models.model import ServedModel
from models.pooling.alignment import find_alignment
from worker.capacity import WorkerLimits
from worker.config import WorkerConfig
from worker.devices.base import Device
from worker.features.media.alignment import Aligner
from worker.features.media.source_table import SourceTable
from worker.features.media.step_sources import StepSources, block_bytes, encoder_bytes, encoder_layers
from worker.host.memory import Pages
from worker.protocol import NewSeq, StepInput
from worker.steps.batch import Batch, Outcome, Pool
from worker.steps.feature import Feature
from worker.tables.positions import Columns, PlainRead, Read
from worker.tables.slots import Slots
from worker.tables.staging import Packet
from worker.worker_facts import WorkerFacts


class Sources(Feature):
    _table: SourceTable
    _blocks = 0
    """The blocks for sources, behind which there is one that is zero."""
    _pages = Pages()
    _aligner: Aligner | None = None

    def __init__(
        self,
        source: SourceModel,
        model: ServedModel,
        config: WorkerConfig,
        block_size: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        device: Device,
    ) -> None:
        """`dtypes`: those of the model and of its cache."""
        self._source, self._model, self._config, self._device = source, model, config, device
        self._block_size, (self._dtype, self._cache_dtype) = block_size, dtypes
        self._steps = StepSources(source, block_size, device.target, self._dtype)
        self._each = -(-source.source_len // block_size)
        """The blocks of the longest source."""
        self._longest = 0

    def step_bytes(self, limits: WorkerLimits) -> int:
        return encoder_bytes(self._source, self._config.model, limits.max_num_batched_tokens, self._dtype)

    def block_bytes(self, longest: int) -> int:
        self._longest = max(1, longest)
        return -(-self._each * block_bytes(self._model, self._block_size, self._cache_dtype) // self._longest)

    def open(self, limits: WorkerLimits, slots: Slots, blocks: int) -> Sequence[Tensor]:
        self._blocks = max(self._each, blocks * self._each // self._longest)
        parts = self._bind(self._blocks)
        self._pages = self._device.pages(parts, self._blocks) if parts else Pages()
        self._table = SourceTable(slots.count + 1, self._source.source_len, self._block_size, self._blocks)
        slots.rooms["source"] = self._table.width
        if (alignment := find_alignment(self._model.modules())) is not None:
            self._aligner = Aligner(alignment, slots, self._table)
        return ()

    def add_facts(self, facts: WorkerFacts) -> WorkerFacts:
        source = self._source
        return msgspec.structs.replace(
            facts,
            source_kind=source.source_kind,
            source_layers=encoder_layers(source),
            source_len=source.source_len,
            source_shape=source.source_shape,
            num_source_blocks=self._blocks,
        )

    def begin(self) -> None:
        self._pages.start()

    def close(self) -> None:
        self._pages.close()

    def before(self, step: StepInput) -> None:
        for source in step.sources:
            self._pages.follow(source.blocks)
        if step.sources or step.source_layers or step.fresh:
            self._steps.update(step)

    def admit(self, new: NewSeq) -> None:
        self._table.admit(new)
        if self._aligner is not None:
            self._aligner.admit(new)

    def read(self, columns: Columns, step: StepInput) -> Sequence[Read]:
        queries = None if self._aligner is None else self._aligner.open_queries(columns.slots)
        return (PlainRead(lambda packet: self._table.stage(columns, packet, queries)),)

    def follow(self, batch: Batch, ids: Tensor, step: ForwardContext, outcome: Outcome) -> Outcome:
        if self._aligner is not None:
            self._aligner.keep(batch)
        return outcome

    def plan_pools(self, columns: Columns, packet: Packet) -> Sequence[Pool]:
        return [self._aligner.finish] if self._aligner else ()

    def _bind(self, blocks: int) -> list[Tensor]:
        """Give each layer of cross-attention its part of memory, and return the keys and the values of all
        [blocks + 1, ...]. The block behind those of sources is zero."""
        parts, dtype = list[Tensor](), self._cache_dtype
        for layer in cross_layers(self._model.modules()):
            shape = layer.cache_shape(blocks + 1, self._block_size, dtype)
            layer.kv = self._device.allocate(prod(shape) * dtype.itemsize).view(dtype).view(shape)
            layer.kv[:, blocks] = 0
            parts += layer.kv
        return parts
