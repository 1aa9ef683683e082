"""What the device computes of a step, between the packet that comes and the output that goes.

`Compute` is the plain way. A device may put one of its own in its place, which replays recordings of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from models.context import AdapterRows, ForwardContext, use_context
from models.layers.state import StateLayer
from models.model import Forward, ServedModel, stream_size
from worker.calls.adapters import lm_head
from worker.pooling import HiddenStore
from worker.ranks.half_steps import HalfStepGroup, cut_step
from worker.ranks.pipeline_stage import Stage
from worker.sampling.grouped_logits import Scan
from worker.sampling.logprobs import prompt_logprob_table, rows_at_once
from worker.sampling.sampler import SampledTokens, SampleTargets, sample
from worker.sampling.top_k_top_p import Draw
from worker.steps.batch import Batch
from worker.steps.drafting import Drafter
from worker.steps.guessed_states import read_later
from worker.tables.adapter_rows import chosen_rows
from worker.tables.positions import LayOut, lay_out
from worker.tables.recorded_forms import Forms
from worker.tables.slots import Slots

WriteBounds = Callable[[Tensor], None]
"""The type of a function that waits for the bounds of a step and writes them into its logits [R, V]."""


@dataclass(frozen=True, slots=True)
class Outcome:
    hidden: Tensor  # [T, H] the last hidden states, or what the next stage gets
    tokens: SampledTokens | None
    prompt_tables: list[Tensor]  # one for each of Batch.prompt_logprobs
    landed: Callable[[], None] | None = None
    """What is left to be done when the sampled tokens are in the table, in a stage before the last one."""


class Computing(Protocol):
    """The type of `Compute`, and of what a device puts in its place."""

    lay_out: LayOut
    forms: Forms | None
    """The recordings for which steps may be planned."""

    def __call__(self, batch: Batch, write_bounds: WriteBounds) -> Outcome: ...

    def prepare(self) -> bool:
        """Work for a moment, while no step is under way, to speed up later ones -> whether more is left."""
        ...

    urgent: int
    """How often `prepare` is called before the first request."""

    def close(self) -> None:
        """Give recordings back, before the groups are closed with whose ranks they exchange tensors."""
        ...


class Unrecordable(Exception):
    """A step cannot be recorded; the message says why."""


class UnreadStep(ForwardContext):
    """A step whose lengths must not be read on the host: a model may choose by them what it computes."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("query_lens_host", "kv_lens_host"):
            raise Unrecordable(f"it reads {name}")
        return super().__getattribute__(name)


def unread(step: ForwardContext) -> UnreadStep:
    """The same step with lengths that must not be read on the host."""
    unread_step = UnreadStep(**{field.name: getattr(step, field.name) for field in fields(step)})
    unread_step.others = [unread(each) for each in step.others]
    unread_step.source = None if step.source is None else unread(step.source)
    return unread_step


@dataclass(eq=False)
class Compute:
    """Computes step after step. A device that only has a quicker layout or forward pass sets these here."""

    model: ServedModel
    slots: Slots
    _: KW_ONLY
    vocab_size: int
    scan: Scan
    draw: Draw
    stage: Stage | None
    generates: bool
    """Whether there are steps that sample."""
    kills: int = 0
    """How many workers were killed in this one's place because memory ran out."""
    hidden_store: HiddenStore | None = None
    """Where all last hidden states are stored, if some task reads those of earlier steps."""
    replicas: HalfStepGroup | None = None
    """This rank and those with which it may compute halves of steps."""
    drafter: Drafter | None = None
    lay_out: LayOut = lay_out
    forms: Forms | None = None
    urgent: int = 0

    def __post_init__(self) -> None:
        self.forward: Forward = self.model.forward
        if self.stage is not None:
            self.stage.width = stream_size(self.model, self.stage.width)
        self._head = lm_head(self.model.modules()) if self.slots.adapts else None
        self._state_layers = [each for each in self.model.modules() if isinstance(each, StateLayer)]

    @property
    def ends_model(self) -> bool:
        """Whether this computes the last layers, after which tokens are sampled and texts pooled."""
        return self.stage is None or self.stage.last

    def __call__(self, batch: Batch, write_bounds: WriteBounds) -> Outcome:
        ids, context = batch.lay_out()
        context.replica_tokens = batch.step.replica_tokens
        stream = self.stage.open_stream(len(ids)) if self.stage else None
        if self.stage and stream is not None:
            self.stage.receive_stream(stream)
        hidden = self.compute_hidden(ids, context, batch.step.first_halves, stream)
        return self.follow(batch, ids, context, self.finish(batch, hidden, write_bounds, context.adapters))

    def follow(self, batch: Batch, ids: Tensor, context: ForwardContext, outcome: Outcome) -> Outcome:
        """Let states go on by guesses that hold, and the drafter read a step of these tokens [T]."""
        if self._state_layers and batch.asked is not batch.step:
            landed = read_later(self._state_layers, batch, self.slots, copies=not self.ends_model)
            if self.ends_model:
                landed()
            else:
                outcome = replace(outcome, landed=landed)
        if self.drafter is not None:
            self.drafter.extend(batch, ids, context, outcome.hidden)
        return outcome

    def finish(
        self, batch: Batch, hidden: Tensor, write_bounds: WriteBounds, adapters: AdapterRows | None
    ) -> Outcome:
        """Compute what follows the last hidden states [T, H] of a step."""
        if not self.ends_model:
            return Outcome(hidden, None, [])
        tables = self.report_prompts(batch, hidden, adapters)
        sampled = batch.sampled
        if sampled is None:
            return Outcome(hidden, None, tables)
        logits = self.logits(hidden, sampled.last, adapters)
        return Outcome(hidden, self.choose(logits, sampled, write_bounds), tables)

    def logits(self, hidden: Tensor, chosen: Tensor | slice | None, adapters: AdapterRows | None) -> Tensor:
        """The logits of chosen rows of hidden states [T, H], or of all, whose tokens have these adapters."""
        rows = hidden if chosen is None else hidden[chosen]
        if self._head is None or adapters is None or not self.slots.adapt_head(adapters):
            return self.model.logits(rows)
        self._head.adapted = adapters if chosen is None else chosen_rows(adapters, chosen)
        try:
            return self.model.logits(rows)
        finally:
            self._head.adapted = None

    def report_prompts(self, batch: Batch, hidden: Tensor, adapters: AdapterRows | None) -> list[Tensor]:
        """The logprobs of prompts, one table for each of Batch.prompt_logprobs."""

        def logits_of(rows: slice) -> Tensor:
            return self.logits(hidden, rows, adapters)

        size = rows_at_once(self.vocab_size, self.kills)
        return [
            prompt_logprob_table(plan, self.slots.tokens, logits_of, size) for plan in batch.prompt_logprobs
        ]

    def prepare(self) -> bool:
        return False

    def close(self) -> None:
        """Do nothing: there are no recordings."""

    def compute_hidden(
        self,
        ids: Tensor,
        context: ForwardContext,
        first_halves: Sequence[int] = (),
        stream: Tensor | None = None,
    ) -> Tensor:
        """The last hidden states [T, H], which are stored, too. `stream` [T, width]: the stage before's."""

        def compute(part: ForwardContext, own: slice) -> Tensor:
            if ids.is_cuda:
                torch.cuda.set_device(ids.device)  # a thread of its own begins with the first one
            with torch.inference_mode(), use_context(part):
                return self.forward(ids[own], part.positions, None if stream is None else stream[own])

        if first_halves and self.replicas is not None:
            first, second = cut_step(context, first_halves, self.replicas.rank)
            tokens = len(first.positions)
            halves = self.replicas.compute_both(
                lambda: compute(first, slice(tokens)), lambda: compute(second, slice(tokens, None))
            )
            hidden = torch.cat(halves)
        else:
            with use_context(context):
                hidden = self.forward(ids, context.positions, stream)
        if self.hidden_store is not None:
            self.hidden_store.write(hidden, context)
        return hidden

    def choose(self, logits: Tensor, sampled: SampleTargets, write_bounds: WriteBounds) -> SampledTokens:
        """Sample from logits [R, V], which are overwritten, and note the tokens in the table."""
        table = self.slots.tokens
        forbid = write_bounds if sampled.bound else None
        process = None if self.slots.processors is None else partial(self._process, sampled)
        plan = sampled.plan
        tokens = sample(logits, plan, table, self.scan, draw=self.draw, forbid=forbid, process=process)
        table.view(-1)[sampled.flat] = tokens.tokens
        return tokens

    def _process(self, sampled: SampleTargets, logits: Tensor) -> dict[int, str]:
        """Have the operator's processors change logits -> row: why it samples nothing."""
        if self.slots.processors is None:
            return {}
        last_tokens = self.slots.tokens.view(-1)[sampled.flat - 1]
        return self.slots.processors.apply(logits, sampled.slots, last_tokens)
