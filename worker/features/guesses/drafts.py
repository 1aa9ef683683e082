"""Drafters as a feature: models that guess what the served one will sample next.

A drafter follows every step, and keeps entries of its own in the same cache blocks. So chunks of prompts,
shared prefixes and preemption are as right for it as for the served model. Its guesses go up with the output
of a step and come down again with a later one: the worker keeps none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from models.context import ForwardContext
from models.families.drafters.head import DraftHead
from models.layers.attention import CachedAttention
from models.layers.state import state_layers
from models.loader import LoadOptions, begin_reading
from models.model import ServedModel
from models.parallel.parallel import Parallel
from models.pooling.config import PoolingConfig
from worker.capacity import WorkerLimits
from worker.config import DrafterConfig, WorkerConfig
from worker.devices.base import Device
from worker.features.guesses.draft_model import DraftModel, Newest
from worker.features.guesses.hidden_drafter import HiddenDrafter
from worker.host.memory import release_after_loading
from worker.loading import load_weights
from worker.protocol import StepInput, StepOutput
from worker.steps.batch import Batch, Launched, Outcome
from worker.steps.feature import Feature, Passes
from worker.tables.slots import Slots
from worker.tables.staging import Packet


class Drafts(Feature):
    def __init__(self, drafter: DraftModel, device: Device) -> None:
        self.drafter, self._device = drafter, device

    def weights(self) -> Iterable[Tensor]:
        return self.drafter.parameters()

    def attention_layers(self) -> Sequence[CachedAttention]:
        return self.drafter.attention_layers()

    def block_bytes(self, longest: int) -> int:
        return self.drafter.block_bytes

    def open(self, limits: WorkerLimits, slots: Slots, blocks: int) -> Sequence[Tensor]:
        packet = Packet(self._device.staging_buffer, limits.staged_words)
        self.drafter.begin(slots, packet, self._device.scan, self._device.draw)
        return self.drafter.parts

    def passes(self) -> Passes:
        return self.drafter

    def follow(self, batch: Batch, ids: Tensor, step: ForwardContext, outcome: Outcome) -> Outcome:
        self.drafter.extend(batch, ids, step, outcome.hidden)
        return outcome

    def finish(self, step: StepInput, launched: Launched) -> Launched:
        """Let the drafter guess behind the sequences of a step for which it is asked."""
        if not [seq for seq in step.seqs if seq.proposes]:
            return launched
        output = launched.result()
        began = time.perf_counter()
        newest: list[Newest] = []
        first = 0
        for seq, token in zip(step.seqs, output.tokens, strict=True):
            if seq.proposes and token >= 0:
                held = len(output.held.get(seq.slot, ()))
                position, row = seq.start + seq.count + held, first + seq.count - 1 + held
                newest.append(Newest(seq.slot, position, row, seq.output_index + held + 1, seq.proposes))
            first += seq.tokens
        drafts = self.drafter.propose(newest) if newest else {}
        proposing = time.perf_counter() - began
        return Proposed(msgspec.structs.replace(output, drafts=drafts, proposing=proposing))


@dataclass(frozen=True, slots=True)
class Proposed:
    """The output of a step, with guesses for the next one."""

    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


def load_drafter(
    config: WorkerConfig,
    options: LoadOptions,
    device: Device,
    model: ServedModel,
    report: Callable[[str, float], None],
) -> Drafts | None:
    """Load the drafter for `model`, which was loaded with these options; the last stage has it."""
    drafter = config.drafter
    if drafter is None:
        return None
    if not model.causal:
        raise ValueError(
            f"--speculative-config: nothing is guessed for {config.model.architecture}, which is an encoder: "
            "leave it out"
        )
    if device.target.type != "cpu" and options.parallel.stages > 1:
        raise ValueError(  # its stage alone would replay other graphs than its neighbours
            f"--speculative-config: {drafter.method} needs one stage on {device.name}: leave it out, or "
            "--pipeline-parallel-size"
        )
    ranks = replace(
        options.parallel, stage=0, stages=1
    )  # it lies in the last stage, and is no part of others
    of_drafter = replace(
        options,
        config=drafter.model,
        folder=Path(drafter.folder),
        language_model_only=True,
        parallel=Parallel() if drafter.whole else ranks,
        conversion=drafter.conversion,
        pooling=PoolingConfig(),
        method=drafter.method,
        target=None if drafter.conversion else model,
    )
    if of_drafter.target is not None:
        begin_reading(of_drafter)
    if not options.parallel.last:
        return None
    loaded: Any = load_weights(of_drafter, device, report)
    release_after_loading(of_drafter.folder)
    return Drafts(_make_drafter(loaded, drafter), device)


def _make_drafter(loaded: Any, drafter: DrafterConfig) -> DraftModel:
    """Make the drafter that guesses by a loaded model, or by loaded layers."""
    vocabulary = drafter.model.vocab_size
    if isinstance(loaded, DraftHead):
        return HiddenDrafter(loaded, vocabulary, drawn=drafter.drawn)
    if not loaded.causal or state_layers(loaded.modules()):
        raise ValueError(
            f"--speculative-config: {drafter.model.architecture} cannot be a drafter, because it is an "
            "encoder or keeps states: choose one whose layers all attend to earlier tokens"
        )
    return DraftModel(loaded, vocabulary, drawn=drafter.drawn)
