"""A driver of a model whose sequences have adapters, each from a position on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from drive import Driver, load_ranks

from models.config import read_config
from models.context import AdapterRows, ForwardContext
from models.loader import LoadOptions
from models.model import CausalLM, ServedModel
from worker.calls.lora_store import Adapters, lm_head
from worker.options import LoraOptions
from worker.tables.adapter_rows import Run, numbers_of


def adapters_of(model: CausalLM, folder: Path, most: int = 8, most_rank: int = 16) -> Adapters:
    """Let a model that was loaded from a folder have adapters."""
    options = LoraOptions(enable_lora=True, max_cpu_loras=most, max_lora_rank=most_rank)
    loading = LoadOptions(read_config(folder, {}), folder, dtype=torch.float32)
    return Adapters(options, loading, cast("ServedModel", model))


def enter(ranks: Sequence[CausalLM], folder: Path, adapters: Mapping[int, Path]) -> None:
    """Load adapters beside a model that was loaded from a folder, under these numbers."""
    for model in ranks:
        held = adapters_of(model, folder)
        for number, adapter in adapters.items():
            held.read(number, str(adapter))
            held.enter(number)


class AdaptedDriver(Driver):
    """Sequences have the adapters of `chosen`: row -> number and first position."""

    def __init__(
        self,
        folder: Path,
        adapters: Mapping[int, Path],
        ranks: int = 1,
        dtype: torch.dtype = torch.float32,
        most_rank: int = 16,
    ) -> None:
        loaded = load_ranks(folder, ranks, dtype=dtype)
        self.held = [adapters_of(model, folder, most_rank=most_rank) for model in loaded]
        for number, adapter in adapters.items():
            self.facts = [held.read(number, str(adapter)) for held in self.held]
            for held in self.held:
                held.enter(number)
        super().__init__(loaded, sequences=8, dtype=dtype)
        heads = (lm_head(model.modules()) for model in loaded)
        self._heads = [head for head in heads if head is not None and head.adapters is not None]
        self.chosen: dict[int, tuple[int, int]] = {}

    def _context(self, rows: list[int], counts: list[int]) -> ForwardContext:
        begins = [self._counts[row] for row in rows]
        step = super()._context(rows, counts)
        runs: list[Run] = []
        token = 0
        for row, begin, count in zip(rows, begins, counts, strict=True):
            number, first = self.chosen.get(row, (0, 0))
            before = min(count, max(0, first - begin))
            if number and before < count:
                runs.append((number, token + before, count - before))
            token += count
        if runs:
            words = torch.tensor(numbers_of(runs, token), dtype=torch.int32)
            step.adapters = AdapterRows(words[:token], words[token:].clone(), runs)
        for head in self._heads:
            head.adapted = step.adapters
        return step
