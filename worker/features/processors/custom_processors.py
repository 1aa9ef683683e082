"""Logits processors: classes of the operator's own that change logits before tokens are chosen.

They speak vLLM's protocol of batches. A batch is the requests that sample in a step, each of which keeps its
place from step to step; one that leaves out a step is removed, and added again with its output so far.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec
import torch
from torch import Tensor

from models.plugins import load_plugin
from worker.capacity import WorkerLimits
from worker.config import WorkerConfig
from worker.protocol import REFUSED_ARGUMENTS, NewSeq, Sampling
from worker.sampling.sampler import SampleTargets
from worker.steps.feature import Feature
from worker.tables.slots import Slots
from worker.worker_facts import WorkerFacts

_log = logging.getLogger(__name__)

OWN = {
    "vllm.model_executor.models.deepseek_ocr:NGramPerReqLogitsProcessor": (
        "worker.features.processors.repeated_ngrams:RepeatedNgrams"
    )
}
"""Classes of ours that do what those of vLLM with these names do, which start scripts name."""


class MoveDirectionality(Enum):
    """The kind of a move within a batch: whether the request at its goal moves the other way."""

    UNIDIRECTIONAL = 0
    """Nobody is there any more."""
    SWAP = 1
    """Who is there takes the other place."""


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """The changes of a batch since the last step, to be read in the order removed, added, moved."""

    batch_size: int
    removed: Sequence[int]
    """Places that nobody has taken."""
    added: Sequence[tuple[int, Sampling, list[int], list[int]]]
    """The place, parameters, prompt and output of each newcomer. The output grows with every token."""
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class LogitsProcessor:
    """The base of an operator's class, which may also have these methods without it."""

    @classmethod
    def validate_params(cls, sampling_params: Sampling) -> None:
        """Raise ValueError if a request's `extra_args` cannot be used."""

    def __init__(self, vllm_config: WorkerConfig, device: torch.device, is_pin_memory: bool) -> None: ...

    def is_argmax_invariant(self) -> bool:
        """Whether the likeliest token stays the likeliest. Processors are applied to greedy rows, too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before `apply`; None if the batch is the same."""

    def apply(self, logits: Tensor) -> Tensor:
        """Change logits [batch, vocabulary], in place or not, and return them."""
        return logits


@dataclass(eq=False, slots=True)
class _Request:
    params: Sampling
    prompt: list[int]
    output: list[int]
    refused: str
    """Why its arguments are refused; empty if they are not."""
    samples: bool = False
    """Whether it has sampled a token here, which its output does not have yet."""


class Processors(Feature):
    """The operator's classes, which change the logits of all rows that sample."""

    def __init__(self, config: WorkerConfig, device: torch.device, nobody: int = -1) -> None:
        """`nobody`: the slot of no request. Raises ValueError if a class cannot be used."""
        flag = "--logits-processors"
        named = config.options.logits_processors
        self._classes = {name: load_plugin(flag, OWN.get(name, name)) for name in named}
        self._config, self._device, self._nobody = config, device, nobody
        self._requests: dict[int, _Request] = {}
        """The requests that generate, by slot."""
        self._batch: list[_Request] = []
        for name, each in self._classes.items():
            if not (callable(getattr(each, "update_state", None)) and callable(getattr(each, "apply", None))):
                raise ValueError(f"{flag} {name}: it has no methods update_state and apply (docs/plugins.md)")
        self._processors = self._make()

    def open(self, limits: WorkerLimits, slots: Slots, blocks: int) -> Sequence[Tensor]:
        self._nobody, slots.changes_logits = slots.dummy, True
        return ()

    def add_facts(self, facts: WorkerFacts) -> WorkerFacts:
        """Say that requests may give arguments, and that nothing is guessed beside."""
        return msgspec.structs.replace(facts, processes_logits=True, most_rows=0)

    def process(self, logits: Tensor, targets: SampleTargets, last: Tensor) -> Mapping[int, str]:
        return self.apply(logits, targets.slots, last)

    def admit(self, new: NewSeq) -> None:
        self._requests.pop(new.slot, None)
        if isinstance(new.params, Sampling) and new.slot != self._nobody:
            prompt, output = new.tokens[: new.prompt_len], new.tokens[new.prompt_len :]
            self._requests[new.slot] = _Request(new.params, prompt, output, self._refusal(new.params))

    def apply(self, logits: Tensor, slots: Sequence[int], last_tokens: Tensor) -> dict[int, str]:
        """Change logits [R, V] in place -> row: why its request cannot go on, which samples nothing.

        `last_tokens` [R]: the token before each row. What is forbidden stays so; where processors forbid all
        that is left, the row stays as it was.
        """
        rows: dict[_Request, int] = {}
        for row, (slot, token) in enumerate(zip(slots, last_tokens.tolist(), strict=True)):
            if (request := self._requests.get(slot)) is not None:
                if request.samples:
                    request.output.append(token)
                request.samples = True
                rows[request] = row
        failed = {row: request.refused for request, row in rows.items() if request.refused}
        update = self._arrange([request for request in rows if not request.refused])
        order = [rows[request] for request in self._batch]
        if order:
            before = logits[order]
            changed, broken = self._process(before, update)
            allowed = changed.masked_fill(before == -torch.inf, -torch.inf)
            nothing = (allowed == -torch.inf).all(1, keepdim=True)
            logits[order] = torch.where(nothing, before, allowed)
            failed |= {order[place]: why for place, why in broken.items()}
        for row in failed:
            logits[row] = torch.nan
        return failed

    def _refusal(self, params: Sampling) -> str:
        """Why a request's arguments are refused, if a class does so."""
        for name, each in self._classes.items():
            try:
                if (validate := getattr(each, "validate_params", None)) is not None:
                    validate(params)
            except ValueError as error:
                return f"{REFUSED_ARGUMENTS}{error}"
            except Exception as error:
                return self._explain(name, error)
        return ""

    def _process(self, logits: Tensor, update: BatchUpdate | None) -> tuple[Tensor, dict[int, str]]:
        """The logits of the batch, changed, and for places whose request fails, why."""
        try:
            return self._run(self._processors, logits.clone(), update), {}
        except Exception:
            _log.exception(
                "a logits processor failed; each of its %d requests is computed alone", len(logits)
            )
        rows, failed = list(logits.split(1)), dict[int, str]()
        for place, request in enumerate(self._batch):
            added = [(0, request.params, request.prompt, request.output)]
            for name in self._classes:
                try:
                    alone = self._make([name])
                    rows[place] = self._run(alone, rows[place].clone(), BatchUpdate(1, [], added, []))
                except Exception as error:
                    failed[place] = self._explain(name, error)
                    break
        self._processors, self._batch = self._make(), []
        return torch.cat(rows), failed

    def _make(self, names: Sequence[str] = ()) -> list[Any]:
        pins = self._device.type == "cuda"
        chosen = [self._classes[name] for name in names or self._classes]
        return [each(self._config, self._device, pins) for each in chosen]

    @staticmethod
    def _run(processors: Sequence[Any], logits: Tensor, update: BatchUpdate | None) -> Tensor:
        for each in processors:
            each.update_state(update)
            changed = each.apply(logits)
            if changed.shape != logits.shape:
                raise ValueError(f"apply returned a tensor of shape {list(changed.shape)}")
            logits = changed
        return logits

    def _arrange(self, wanted: Sequence[_Request]) -> BatchUpdate | None:
        """Let the batch be these requests, those that were in it at their places -> what has changed."""
        batch, present, stay = self._batch, {*self._batch}, {*wanted}
        gone = [place for place, each in enumerate(batch) if each not in stay]
        added: list[tuple[int, Sampling, list[int], list[int]]] = []
        for each in wanted:
            if each in present:
                continue
            place = gone.pop(0) if gone else len(batch)
            batch[place : place + 1] = [each]
            added.append((place, each.params, each.prompt, each.output))
        removed, moved = list(gone), list[tuple[int, int, MoveDirectionality]]()
        while gone:
            last = len(batch) - 1
            if gone[-1] == last:
                gone.pop()
                batch.pop()
                continue
            place = gone.pop(0)
            batch[place] = batch.pop()
            moved.append((last, place, MoveDirectionality.UNIDIRECTIONAL))
        if not (removed or added):
            return None
        return BatchUpdate(len(batch), removed, added, moved)

    @staticmethod
    def _explain(name: str, error: Exception) -> str:
        return f"the logits processor {name} failed: {type(error).__name__}: {error}"
