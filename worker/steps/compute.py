"""Computes a step on the device, from the packet that comes to the output that goes.

`Compute` is the plain way. A device may put one of its own in its place, which replays recordings of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from models.context import ForwardContext, compute_in
from models.model import Forward, ServedModel, stream_size
from worker.protocol import StepInput
from worker.ranks.pipeline_stage import Stage
from worker.sampling.grouped_logits import Scan
from worker.sampling.logprobs import prompt_logprob_table, rows_at_once
from worker.sampling.sampler import SampledTokens, SampleTargets, sample
from worker.sampling.top_k_top_p import Draw
from worker.steps.batch import Batch, Launched, NotedStep, Outcome, Staged
from worker.steps.feature import Hooks, Passes
from worker.tables.positions import Columns, LayOut, lay_out
from worker.tables.slots import Slots
from worker.tables.staging import Packet


class Computing(Protocol):
    """The type of `Compute`, and of what a device puts in its place."""

    def begin(self, asked: StepInput, step: StepInput, columns: Columns, packet: Packet) -> Staged:
        """Begin the packet of a step, which the engine has sent as `asked`."""
        ...

    def __call__(self, batch: Batch) -> Outcome: ...

    def prepare(self) -> bool:
        """Work for a moment, while no step is under way, to speed up later ones -> whether more is left."""
        ...

    replay: Callable[[NotedStep], Launched | None] | None
    """The function that computes a whole step, tables and output too, by one recorded call; it returns None
    for a step that has no such recording. None: no step has one."""

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
    unread_step.source = step.source and unread(step.source)
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
    hooks: Hooks = field(default_factory=Hooks)
    kills: int = 0
    """How many workers were killed in this one's place because memory ran out."""
    lay_out: LayOut = lay_out
    replay: Callable[[NotedStep], Launched | None] | None = None
    urgent: int = 0

    def __post_init__(self) -> None:
        self.forward: Forward = self.model.forward
        if self.stage:
            self.stage.width = stream_size(self.model, self.stage.width)
        self.ends_model = self.stage.last if self.stage else True
        """Whether this computes the last layers, after which tokens are sampled and texts pooled."""

    @property
    def passes(self) -> list[Passes]:
        """The forward passes of features, which a device may record beside the model's."""
        return [each() for each in self.hooks.passes]

    def begin(self, asked: StepInput, step: StepInput, columns: Columns, packet: Packet) -> Staged:
        return Staged(self.lay_out(columns, self.slots, packet))

    def __call__(self, batch: Batch) -> Outcome:
        ids, context = batch.lay_out()
        stream = self.stage.open_stream(ids.shape[0]) if self.stage else None
        if self.stage and stream is not None:
            self.stage.receive_stream(stream)
        hidden = self.compute_hidden(ids, context, stream)
        outcome = self.finish(batch, hidden, context)
        for follow in self.hooks.follow:
            outcome = follow(batch, ids, context, outcome)
        return outcome

    def finish(self, batch: Batch, hidden: Tensor, context: ForwardContext) -> Outcome:
        """Compute what follows the layers of a step, from what the last of them gives [T, H]."""
        if not self.ends_model:
            return Outcome(hidden, None, [])
        tables = self.report_prompts(batch, hidden, context) if batch.prompt_logprobs else []
        if not batch.sampled:
            return Outcome(hidden, None, tables)
        logits = self.logits(hidden, batch.sampled.last, context)
        return Outcome(hidden, self.choose(logits, batch, batch.sampled), tables)

    def logits(self, hidden: Tensor, chosen: Tensor | slice | None, context: ForwardContext) -> Tensor:
        """The logits of chosen tokens of a step, or of all, by what the last layer gives [T, H]."""
        for prepare in self.hooks.before_logits:
            prepare(context, chosen)
        return self.model.logits(hidden if chosen is None else hidden[chosen])

    def report_prompts(self, batch: Batch, hidden: Tensor, context: ForwardContext) -> list[Tensor]:
        """The logprobs of prompts, one table for each of Batch.prompt_logprobs."""
        tokens, size = self.slots.tokens, rows_at_once(self.vocab_size, self.kills)
        return [
            prompt_logprob_table(plan, tokens, lambda rows: self.logits(hidden, rows, context), size)
            for plan in batch.prompt_logprobs
        ]

    def prepare(self) -> bool:
        return False

    def close(self) -> None:
        """Do nothing: there are no recordings."""

    def compute_hidden(self, ids: Tensor, context: ForwardContext, stream: Tensor | None = None) -> Tensor:
        """What the last layer gives [T, H]. `stream` [T, width]: the stage before's."""
        hidden = compute_in(context, self.forward, ids, context.positions, stream)
        for keep in self.hooks.keep:
            keep(hidden, context)
        return hidden

    def choose(self, logits: Tensor, batch: Batch, targets: SampleTargets) -> SampledTokens:
        """Sample from logits [R, V], which are overwritten, and note the tokens in the table."""
        table, hooks = self.slots.tokens, self.hooks
        tokens = sample(
            logits,
            targets.plan,
            table,
            self.scan,
            draw=self.draw,
            forbid=partial(self._forbid, batch) if targets.bound else None,
            process=partial(self._process, targets) if hooks.process else None,
        )
        table.view(-1)[targets.flat] = tokens.packed[0]
        return tokens

    def _forbid(self, batch: Batch, logits: Tensor) -> None:
        for forbid in self.hooks.forbid:
            forbid(logits, batch)

    def _process(self, targets: SampleTargets, logits: Tensor) -> dict[int, str]:
        """Have features change logits -> row: why it samples nothing."""
        last, failed = self.slots.tokens.view(-1)[targets.flat - 1], dict[int, str]()
        for process in self.hooks.process:
            failed |= process(logits, targets, last)
        return failed
