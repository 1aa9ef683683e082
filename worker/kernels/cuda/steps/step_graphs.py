"""Steps as CUDA graphs: those of single tokens by rows, small ones of prompts and texts by tokens.

A step is replayed from its form to its tokens. If some row masks, penalises or reports logits, a step of
single tokens is replayed up to its logits, and any other up to its hidden states, as it is if nothing samples
or many rows do. What follows is computed as in any other step, and larger steps are from their beginning.

Ranks that share layers replay their exchanges with a step. They have the same graphs (`recorder.py`), and
choose one by what a step asks for, so that all replay the same. Of several stages each replays what lies
between receiving the stream and sending it on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.state_rows import STATE_COLUMNS
from worker.kernels.cuda.attention_plan import PlannedLayout
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.fused.choice import JoinedSteps
from worker.kernels.cuda.fused.largest import joined_scan
from worker.kernels.cuda.products.adapters import on_device
from worker.kernels.cuda.steps.draft_passes import DraftPasses, PassForm, is_pass_of
from worker.kernels.cuda.steps.graph_capture import Capture, GraphRecording, Missing, Recorder
from worker.kernels.cuda.steps.graph_sizes import URGENT_TOKENS, forms_to_make, is_of, size_of, with_pass
from worker.kernels.cuda.steps.layout_kernels import (
    SampleTensors,
    StepTensors,
    lay_out_sampling,
    lay_out_single_tokens,
    lay_out_splits,
    unread_step,
)
from worker.kernels.cuda.steps.mixed_step import MOST_ROWS, MOST_SAMPLES, MixedStep
from worker.kernels.cuda.steps.recorded_forms import (
    Form,
    MixedForm,
    SlotProgress,
    StagedForm,
    begin_step,
)
from worker.protocol import StepInput
from worker.ranks.process_groups import Groups
from worker.sampling.grouped_logits import GroupedLogits
from worker.sampling.sampler import SampledTokens
from worker.sampling.top_k_top_p import Draws
from worker.steps.batch import Batch, Launched, NotedStep, Outcome, Staged
from worker.steps.compute import Compute, Computing, UnreadStep
from worker.tables.adapter_rows import AdapterReads
from worker.tables.positions import Columns, LayOut
from worker.tables.staging import Packet, columns_of

logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""The sizes of graphs of single tokens."""
TOKENS = (16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 4096, 6144, 8192)
"""The sizes of graphs of other steps. Beyond 512 tokens that fill a step up take a card's time."""
_FORM_WORDS = 1 << 17
"""Room for a form, and for what sampling needs behind it."""
_GRAPH_BYTES = 4 << 20
"""What the driver takes for a graph, roughly."""

Recorded = tuple[Tensor, Tensor, list[Tensor]]
"""The type of what the work of a step returns: all of a `_Graph` but its replay."""
Work = Callable[[], Recorded]
DrawInto = Callable[[GroupedLogits, Draws, Tensor], None]
"""The type of a function that draws tokens for the rows that have a temperature, into [N] int32."""


def sizes_up_to(most: int, sizes: Sequence[int]) -> list[int]:
    """The sizes of the graphs for steps of up to `most` rows or tokens."""
    return [size for size in sizes if size <= most] + [most] * (0 < most < sizes[-1] and most not in sizes)


def graph_bytes(rows: int, tokens: int, *, per_row: int, per_token: int, kinds: int = 1) -> int:
    """An upper bound of the bytes of all graphs: what the largest take, and the driver's own.

    `kinds`: how often there is a graph of each size. `rows`, `tokens`: those of the largest graphs of single
    tokens, and of others, whose hidden states stay. `per_row`: the bytes of logits. `per_token`: those of
    layers.
    """
    rows = min(rows, ROWS[-1])
    of_tokens = 2 if rows else 1
    made = 2 * len(sizes_up_to(rows, ROWS)) + of_tokens * len(sizes_up_to(tokens, TOKENS))
    logits = (rows + min(rows, MOST_SAMPLES)) * per_row
    return kinds * (logits + (rows + 2 * tokens) * per_token + made * _GRAPH_BYTES)


@dataclass(frozen=True, slots=True)
class _Graph:
    hidden: Tensor  # [T, H]
    result: Tensor  # [2, R] as `SampledTokens.packed`, the logits [R, V], or the hidden states again
    streams: list[Tensor]  # [T, H] each: what the decoder gives out for a drafter
    replay: Callable[[], None]

    def tokens_of(self, rows: int) -> SampledTokens:
        """The tokens of the rows of a step that sample, behind which are those of nobody."""
        return SampledTokens(self.result[:, :rows], [])


class Graphs:
    """Replays graphs where there are some. The plain way computes all other steps."""

    replay: Callable[[NotedStep], Launched | None] | None = None

    def __init__(
        self,
        compute: Compute,
        card: Card,
        open_recorder: Callable[[], Recorder],
        draw: DrawInto | None,
        *,
        most: int,
        joins: bool,
    ) -> None:
        """`most`: the tokens of the largest graph. `joins`: whether steps of few rows may use joined kernels.

        `draw`: None if the kernel draws wrong on a card: whole steps take the likeliest tokens only, then.
        """
        slots = compute.slots
        rows = min(most, slots.count, ROWS[-1]) if compute.generates else 0
        target = slots.tokens.device
        self._card, self._layout = card, PlannedLayout(card)
        self.lay_out: LayOut = self._layout
        compute.lay_out = self._layout
        self.progress = SlotProgress(slots)
        self.buffer = torch.zeros(_FORM_WORDS, dtype=torch.int32, device=target)
        self._compute, self._recorder, self._draw = compute, open_recorder(), draw
        self.chooses, self.draws = compute.ends_model, draw is not None
        most_rows = max(rows, min(slots.count, MOST_ROWS))
        self._tensors = StepTensors.make(target, max(rows, most), most_rows, slots.most_blocks, slots.groups)
        """What every graph lays out anew."""
        self._lens = torch.zeros(rows, dtype=torch.int32, device=target)
        self._samples = SampleTensors.make(target, rows)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=target)
        self._logits = torch.empty(rows if self.chooses else 0, compute.vocab_size, device=target)
        self._stream = compute.stage.open_stream(max(rows, most)) if compute.stage else None
        """The place of what the stage before sends, if there is one."""
        if self._stream is not None:
            self._stream.zero_()  # a step may leave over what no stage has sent yet
        passes, self._most_samples = next(iter(compute.passes), None), rows
        # Where a drafter follows, all steps are of one kind, of which it reads the layout.
        self._sizes = [] if passes is not None else sizes_up_to(rows, ROWS)
        self._token_sizes = sizes_up_to(most, TOKENS)
        self._left, self.urgent = forms_to_make(
            self._sizes, self._token_sizes, samples=rows > 0, adapts="adapters" in slots.rooms
        )
        self._graphs: dict[Form | MixedForm, _Graph] = {}
        self._joined, self._seconds = JoinedSteps(target) if joins else None, 0.0  # making graphs took so far
        self._steps: dict[int, MixedStep] = {}  # the places of mixed steps, by their tokens
        # Passes run before what a step has left is read, so they need memory that steps do not share.
        self._passes = DraftPasses(passes, open_recorder, self._layout, self._place_of)
        if self._passes.are_made:
            self._left = [each for form in self._left for each in with_pass(form)]
            self.urgent += sum(is_pass_of(form, URGENT_TOKENS) for form in self._left)

    def begin(self, asked: StepInput, step: StepInput, columns: Columns, packet: Packet) -> Staged:
        return begin_step(self, self._compute.slots, asked, step, columns, packet)

    def find(self, rows: int, *, whole: bool, adapted: bool) -> Form | None:
        """Do not choose a graph of more than twice the rows: what it computes for nobody would cost more."""
        for size in self._sizes:
            form = Form(size, whole, adapted)
            if rows <= size <= 2 * rows and form in self._graphs:
                return form
        return None

    def stage_mixed(self, columns: Columns, sampling: Sequence[int], packet: Packet) -> StagedForm | None:
        """Do not choose a graph of more than twice the tokens, unless it is the smallest there can be."""
        count = columns.query_starts[-1]
        adapted = columns.find(AdapterReads) is not None
        for size in self._token_sizes:
            if not count <= size <= max(self._token_sizes[0], 2 * count):
                continue
            form = self._find_mixed(size, len(columns.slots), len(sampling), adapted=adapted)
            if form is not None:
                finish = self._steps[size].stage(columns, sampling if form.whole else (), packet)
                return StagedForm(finish, form=form)
        return None

    def _find_mixed(self, size: int, rows: int, samples: int, *, adapted: bool) -> MixedForm | None:
        """The form of so many tokens that has room for these rows, and ends as far on as it can."""
        step, whole, plain = self._steps.get(size), *(MixedForm(size, end, adapted) for end in (True, False))
        if step is None or rows > step.rows or not self._passes.follow(size):
            return None
        if whole in self._graphs and 0 < samples <= step.samples:
            return whole
        return plain if plain in self._graphs else None

    def __call__(self, batch: Batch) -> Outcome:
        if not isinstance(batch.staged, StagedForm):
            return self._compute(batch)
        form, sampled, compute = batch.staged.form, batch.sampled, self._compute
        graph = self._graphs[form]
        laid_out = batch.lay_out() if isinstance(form, MixedForm) else None
        hidden = self._replay(graph, sum([seq.count for seq in batch.step.seqs]))
        if not compute.ends_model:
            return Outcome(hidden.clone(), None, [])  # it is sent while other steps are replayed
        if laid_out is not None and isinstance(form, MixedForm):
            ids, context = laid_out
            context.adapters = self._steps[form.tokens].adapters if form.adapted else None
            context.streams = [stream[: len(ids)] for stream in graph.streams]
            if sampled is None or not form.whole:
                outcome = compute.finish(batch, hidden, context)
            else:
                tables = compute.report_prompts(batch, hidden, context)
                outcome = Outcome(hidden, graph.tokens_of(len(sampled.rows)), tables)
            for follow in compute.hooks.follow:
                outcome = follow(batch, ids, context, outcome)
            return outcome
        if form.whole or sampled is None:
            tokens = graph.tokens_of(len(hidden))
        else:
            tokens = compute.choose(graph.result[: len(sampled.rows)], batch, sampled)
        return Outcome(hidden, tokens, [])

    def _replay(self, graph: _Graph, count: int) -> Tensor:
        """Replay a step of `count` tokens; returns their hidden states, which the next replay overwrites."""
        stream = self._stream_of(count)
        if self._compute.stage and stream is not None:
            self._compute.stage.receive_stream(stream)
        graph.replay()
        return graph.hidden[:count]

    def _stream_of(self, count: int) -> Tensor | None:
        return None if self._stream is None else self._stream[:count]

    def prepare(self) -> bool:
        """Make the next graph. One that does not fit in memory is left out; other errors end its kind."""
        if not self._left:
            return False
        form, began = self._left.pop(0), time.monotonic()
        if isinstance(form, PassForm):
            if (missing := self._passes.make(form)) is not None:
                self._leave_out(form, missing)
            return bool(self._left)
        made = self._record(form)
        if isinstance(made, Missing):
            self._leave_out(form, made)
        else:
            # A stage before the last records the same twice, to be in step with the others.
            made_as = form if self.chooses else replace(form, whole=False)
            self._graphs[made_as] = _Graph(*made.result, made.replay)
        self._seconds += time.monotonic() - began
        if self._graphs and not self._left:
            logger.info("all %d CUDA graphs are made, which took %.1f s", len(self._graphs), self._seconds)
        return bool(self._left)

    def _record(self, form: Form | MixedForm) -> GraphRecording[Recorded] | Missing:
        if isinstance(form, MixedForm):
            return self._recorder.record(lambda: self._open_mixed(form))
        if self._joined is None or form.adapted:
            return self._recorder.record(lambda: self._open(form))
        return self._joined.record(self._recorder, form.rows, lambda: self._open(form))

    def close(self) -> None:
        """Give all graphs back: NCCL closes no group that graphs refer to."""
        self._graphs.clear()
        self._passes.close()

    def _leave_out(self, form: Form | MixedForm | PassForm, missing: Missing) -> None:
        if isinstance(form, PassForm):  # nor are the steps that it would follow
            left_out = [form.tokens] if missing.short_of_memory else self._token_sizes
            self._left = [each for each in self._left if not is_of(each, left_out)]
        elif not missing.short_of_memory:
            self._left = [other for other in self._left if type(other) is not type(form)]
        if missing.reason is None:
            return
        if missing.short_of_memory:
            logger.warning("no memory for a CUDA graph of %s: such steps run as they are", size_of(form))
        else:
            kind = "single tokens" if isinstance(form, Form) else "prompts and texts"
            logger.warning("steps of %s are not replayed as CUDA graphs: %s", kind, missing.reason)

    def _open_mixed(self, form: MixedForm) -> Work:
        compute, step = self._compute, self._place_of(form.tokens)
        samples = self._samples.first(step.samples)
        draws = samples.draws()
        step.clear()

        def work() -> Recorded:
            ids, context = step.lay_out(adapted=form.adapted)
            hidden = compute.compute_hidden(ids, context, stream=self._stream_of(len(ids)))
            if not (form.whole and self.chooses):
                return hidden, hidden, context.streams or []
            lay_out_sampling(step.sampling, self.progress.table, compute.slots, samples)
            logits = compute.logits(hidden, step.last, context).contiguous()
            return hidden, self._choose(logits, samples, draws), context.streams or []

        return work

    def _place_of(self, tokens: int) -> MixedStep:
        """The place of mixed steps of up to so many tokens, which is the same however far a graph goes."""
        if tokens not in self._steps:
            self._steps[tokens] = MixedStep(
                tokens,
                self._most_samples,
                self._card,
                self._compute.slots,
                self._layout.kinds,
                self.buffer,
                self._tensors,
            )
        return self._steps[tokens]

    def _open(self, form: Form) -> Work:
        compute, count = self._compute, form.rows
        slots, states = compute.slots, self.progress.table
        steps = [each.first(count, count) for each in self._tensors]
        lens, samples = self._lens[:count], self._samples.first(count)
        context, draws = self._context_of(steps, lens, adapted=form.adapted), samples.draws()
        self.buffer.fill_(-1)
        self.buffer[:count].fill_(slots.dummy)
        if context.states is not None:
            context.states.table.zero_()[:2].fill_(slots.dummy)

        def work() -> Recorded:
            lay_out_single_tokens(self.buffer, states, slots, steps, lens)
            lay_out_splits(lens, context.plan or {}, self._card.processors)
            hidden = compute.compute_hidden(steps[0].ids, context, stream=self._stream_of(count))
            if not self.chooses:
                return hidden, hidden, []
            logits = compute.logits(hidden, None, context).contiguous()
            if not form.whole:
                return hidden, self._keep(logits), []
            lay_out_sampling(self.buffer[:count], states, slots, samples)
            return hidden, self._choose(logits, samples, draws), []

        return work

    def _context_of(self, steps: Sequence[StepTensors], lens: Tensor, *, adapted: bool) -> UnreadStep:
        """The context of a step of single tokens, which has room for its plan of attention.

        `adapted`: whether its form ends with the numbers of adapters.
        """
        slots, count = self._compute.slots, len(lens)
        plan = self._layout.room_for(count, slots.max_len, lens.device)
        has_states = "states" in slots.rooms
        lengths = [count] * (2 + slots.groups) + [STATE_COLUMNS * count] * has_states + [count]
        *_, states, adapters = columns_of(self.buffer, lengths)
        places = states.view(-1, count) if has_states else None
        step = unread_step(steps, self._starts[: count + 1], lens, slots.block_size, plan, places)
        if step.states is not None:
            step.states.single = True
        step.adapters = on_device(adapters) if adapted else None
        return step

    def _choose(self, logits: Tensor, samples: SampleTensors, draws: Draws) -> Tensor:
        """Tokens, and whether the logits of each are finite [2, R]; the tokens go into the table, too."""
        grouped = GroupedLogits(logits, joined_scan(self._compute.scan))
        packed = grouped.best
        if self._draw is not None:
            self._draw(grouped, draws, packed[0])
        self._compute.slots.tokens.view(-1)[samples.flat] = packed[0]
        return packed

    def _keep(self, logits: Tensor) -> Tensor:
        """Bring logits [R, V] to the memory that all graphs have for them: it is read before another runs."""
        return self._logits[: len(logits)].copy_(logits)


def open_graphs(
    compute: Compute,
    card: Card,
    open_capture: Callable[[], Capture],
    draw: DrawInto | None,
    groups: Groups,
    *,
    most: int,
    joins: bool = False,
) -> Computing:
    """What replays steps as graphs, if they can be; else `compute`, which sends plans of attention along.

    What ranks choose by must be the same on all of them, so their cards must be alike, and draw right.
    `most`, `draw` and `joins` are those of `Graphs`; 0: no step is replayed. Ranks that share layers, or
    stages, do not join: each would choose by its own times.
    """
    replays = most > 0 and groups.replicas is None
    if replays and not groups.agree(card.capability << 16 | card.processors):
        logger.warning("steps are not replayed as CUDA graphs, because the cards of the ranks differ")
        replays = False
    if not replays:
        compute.lay_out = PlannedLayout(card)
        for passes in compute.passes:
            passes.quicken(compute.lay_out, None)
        return compute
    draws = groups.minimum(int(draw is not None))
    opened, joins = (lambda: Recorder(open_capture(), groups)), joins and groups.alone
    return Graphs(compute, card, opened, draw if draws else None, most=most, joins=joins)
