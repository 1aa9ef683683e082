"""Media as a feature: pictures, sounds and embeddings in the place of a prompt's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from models.model import ServedModel
from models.towers.tower import Tower, count_layers, sees_media, sees_prompts
from worker.capacity import CacheBudget, WorkerLimits
from worker.config import WorkerConfig
from worker.features.media.media_memory import check_takes_rows, kept_bytes, media_bytes, row_bytes
from worker.features.media.step_media import StepMedia
from worker.protocol import NewSeq, StepInput
from worker.steps.feature import Feature, Taken
from worker.tables.positions import Columns, Read
from worker.tables.slots import Slots
from worker.worker_facts import CosineScores, WorkerFacts

_NO_LIMIT = 1 << 30
"""The number of embeddings that a rank could keep to which none come."""


class Media(Feature):
    _steps: StepMedia
    _most = _kept = 0
    """The most embeddings of an item, and how many are kept beside these for later requests."""

    def __init__(
        self,
        tower: Tower | None,
        model: ServedModel,
        config: WorkerConfig,
        dtype: torch.dtype,
        target: torch.device,
        minimum: Callable[[int], int],
    ) -> None:
        """`tower`: None if only embeddings of prompts come. `minimum`: that of all ranks' numbers."""
        self._tower, self._config, self._dtype, self._target = tower, config, dtype, target
        self._causal, self._minimum = model.causal, minimum
        self._row_bytes = row_bytes(tower, config.model, dtype)
        if config.options.enable_prompt_embeds:
            check_takes_rows(model, tower, config)

    def reads_whole(self) -> bool:
        return sees_prompts(self._tower)

    def keeps_all_blocks(self) -> bool:
        return sees_prompts(self._tower)

    def step_bytes(self, limits: WorkerLimits) -> int:
        if self._tower is None:
            return limits.most_embeddings * self._row_bytes
        if self._config.place.stage > 0:
            return 0
        return media_bytes(self._tower, self._config.model, limits.most_embeddings, self._dtype)

    def take(self, limits: WorkerLimits, budget: CacheBudget) -> Taken:
        """Decide how many embeddings are kept for later requests, on all ranks as many."""
        asked, kept = self._config.options.mm_encoder_cache_gb, _NO_LIMIT
        if self._tower is None or (asked is None and not self._causal):
            return Taken(limits)
        if self._config.place.stage == 0:
            kept = kept_bytes(asked, budget) // self._row_bytes
        self._kept = self._minimum(kept)
        nbytes = self._kept * self._row_bytes if self._config.place.stage == 0 else 0
        return Taken(limits, nbytes, "embeddings of media")

    def open(self, limits: WorkerLimits, slots: Slots, blocks: int) -> Sequence[Tensor]:
        """Take no memory: it grows with the items that come."""
        self._most = limits.most_embeddings
        self._steps = StepMedia(
            *(self._tower, slots, self._target, self._dtype),
            most=self._most + self._kept,
            encodes=self._config.place.stage == 0,
        )
        return ()

    def add_facts(self, facts: WorkerFacts) -> WorkerFacts:
        tower, width = self._tower, self._config.model.hidden_size
        found = getattr(tower, "cosine_scores", None)
        return msgspec.structs.replace(
            facts,
            most_embeddings=self._most,
            row_width=width if self._config.options.enable_prompt_embeds else 0,
            media_width=(1 + tower.levels) * width if tower else 0,
            tower_layers=count_layers(tower),
            kept_embeddings=self._kept,
            whole_media=sees_media(tower),
            whole_prompts=sees_prompts(tower),
            cosine_scores=CosineScores(*found) if found else None,
        )

    def warm_up(self, steps: list[StepInput]) -> list[StepInput]:
        if self._target.type != "cpu":
            self._steps.warm_up(Path(self._config.folder))
        return steps

    def before(self, step: StepInput) -> None:
        self._steps.update(step)

    def admit(self, new: NewSeq) -> None:
        self._steps.admit(new)

    def read(self, columns: Columns, step: StepInput) -> Sequence[Read]:
        return self._steps.read(columns)
