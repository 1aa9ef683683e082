"""Steps of single tokens as CUDA graphs, one for each number of rows: from the form to the tokens.

A step in which some row masks, penalises or reports logits is replayed up to its logits, and sampled as any
other. Steps of more rows, of prompts and of texts are computed as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.kernels.cuda.card import Card
from worker.kernels.cuda.steps.capture import Capture
from worker.kernels.cuda.steps.layout import Layout
from worker.kernels.cuda.steps.rows import Rows, lay_out
from worker.sampling.draw import Draws
from worker.sampling.groups import GroupedLogits
from worker.sampling.sampler import SampledTokens
from worker.steps.batch import Batch
from worker.steps.compute import Compute, Outcome, WriteBounds
from worker.steps.recordings import UnreadStep
from worker.tables.forms import Form, Forms
from worker.tables.positions import LayOut
from worker.tables.states import States

logger = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""The rows of graphs."""
_URGENT = 8
"""The largest graph that is made before the first request."""
_FORM_WORDS = 1 << 16
"""Room for a form, and for what sampling needs behind it."""
_GRAPH_BYTES = 4 << 20
"""What the driver takes for a graph, roughly."""

DrawInto = Callable[[GroupedLogits, Draws, Tensor], None]
"""The type of a function that draws tokens for the rows that have a temperature, into [N] int32."""


def sizes_up_to(most: int) -> list[int]:
    """The rows of the graphs for steps of up to `most` rows."""
    return [size for size in SIZES if size <= most] + [most] * (0 < most < SIZES[-1] and most not in SIZES)


def graph_bytes(most: int, per_row: int) -> int:
    """An upper bound of the bytes of all graphs: the largest one's results, and the driver's own."""
    return most * per_row + 2 * len(sizes_up_to(most)) * _GRAPH_BYTES


@dataclass(frozen=True, slots=True)
class _Graph:
    rows: Rows
    hidden: Tensor  # [R, H]
    result: Tensor  # [2, R] as `SampledTokens.packed`, or the logits [R, V]
    replay: Callable[[], None]


class Graphs:
    """Replays graphs where there are some. The plain way computes all other steps."""

    def __init__(
        self,
        compute: Compute,
        card: Card,
        capture: Capture[tuple[Tensor, Tensor]],
        draw: DrawInto | None,
        *,
        most: int,
    ) -> None:
        """`most`: the rows of the largest graph.

        `draw`: None if the kernel draws wrong on this card: whole steps take the likeliest tokens only, then.
        """
        slots = compute.slots
        target = slots.tokens.device
        self._layout = Layout(card)
        self.lay_out: LayOut = self._layout
        compute.lay_out = self._layout
        self.forms: Forms | None = self
        self.states = States(slots)
        self.buffer = torch.zeros(_FORM_WORDS, dtype=torch.int32, device=target)
        self._compute, self._capture, self._draw = compute, capture, draw
        self.draws = draw is not None
        self._rows = Rows.make(target, most, slots.most_blocks)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=target)
        self._logits = torch.empty(most, compute.vocab_size, device=target)
        self._sizes = sizes_up_to(most)
        small, others = ([size for size in self._sizes if (size <= _URGENT) is few] for few in (True, False))
        self._left = [Form(size, whole=True) for size in reversed(small)]
        self.urgent = len(self._left)
        self._left += [Form(size, whole=True) for size in reversed(others)]
        self._left += [Form(size, whole=False) for size in reversed(self._sizes)]
        self._graphs: dict[Form, _Graph] = {}

    def find(self, rows: int, *, whole: bool) -> Form | None:
        """Do not choose a graph of more than twice the rows: what it computes for nobody would cost more."""
        for size in self._sizes:
            form = Form(size, whole)
            if rows <= size <= 2 * rows and form in self._graphs:
                return form
        return None

    def __call__(self, batch: Batch, write_bounds: WriteBounds) -> Outcome:
        sampled = batch.sampled
        if batch.form is None or sampled is None:
            return self._compute(batch, write_bounds)
        graph = self._graphs[batch.form]
        graph.replay()
        if batch.form.whole:
            tokens = SampledTokens(graph.result, [])
        else:
            tokens = self._compute.choose(graph.result[: len(sampled.rows)], sampled, write_bounds)
        return Outcome(graph.rows.ids, graph.hidden, tokens, [])

    def prepare(self) -> bool:
        """Make the next graph. One that does not fit in memory is left out; other errors end the attempt."""
        if not self._left:
            return False
        form = self._left.pop(0)
        try:
            self._graphs[form] = self._make(form)
        except Exception as reason:  # of the model's own code, too
            if _is_short_of_memory(reason):
                logger.warning("no memory for a CUDA graph of %d rows: such steps run as they are", form.rows)
            else:
                logger.warning("steps are not replayed as CUDA graphs: %s", reason)
                self._left.clear()
        return bool(self._left)

    def _make(self, form: Form) -> _Graph:
        compute, rows = self._compute, self._rows.first(form.rows)
        step = self._step(rows)
        draws = _draws(rows) if self._draw is not None else None
        self.buffer.fill_(-1)
        self.buffer[: form.rows].fill_(compute.slots.dummy)

        def work() -> tuple[Tensor, Tensor]:
            lay_out(self.buffer, self.states.table, compute.slots, rows)
            hidden = compute.compute_hidden(rows.ids, step)
            logits = compute.model.logits(hidden).contiguous()
            return hidden, self._choose(logits, rows, draws) if form.whole else self._keep(logits)

        (hidden, result), replay = self._capture(work)
        return _Graph(rows, hidden, result, replay)

    def _step(self, rows: Rows) -> UnreadStep:
        """The context of a step, whose plan of attention is the same for sequences of any length."""
        slots, count = self._compute.slots, len(rows.ids)
        return UnreadStep(
            positions=rows.positions,
            query_starts=self._starts[: count + 1],
            kv_lens=rows.kv_lens,
            block_table=rows.block_table,
            slot_mapping=rows.slot_mapping,
            block_size=slots.block_size,
            query_lens_host=[],
            kv_lens_host=[],
            plan=self._layout.plan_for([1] * count, [slots.max_len] * count, rows.ids.device),
        )

    def _choose(self, logits: Tensor, rows: Rows, draws: Draws | None) -> Tensor:
        """Tokens, and whether the logits of each are finite [2, R]; the tokens go into the table, too."""
        grouped = GroupedLogits(logits, self._compute.scan)
        packed = grouped.best
        if self._draw is not None and draws is not None:
            self._draw(grouped, draws, packed[0])
        self._compute.slots.tokens.view(-1)[rows.flat] = packed[0]
        return packed

    def _keep(self, logits: Tensor) -> Tensor:
        """Bring logits [R, V] to the memory that all graphs have for them: it is read before another runs."""
        return self._logits[: len(logits)].copy_(logits)


def _is_short_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, and perhaps the end of the capture broke, too."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__context__
    return False


def _draws(rows: Rows) -> Draws:
    """All rows, with whatever options they have; the kernel that draws needs no summary of them."""
    return Draws(
        rows=torch.arange(len(rows.ids), dtype=torch.int32, device=rows.ids.device),
        temperature=rows.temperature[:, None],
        top_p=rows.top_p[:, None],
        top_k=rows.top_k[:, None],
        min_p=rows.min_p[:, None],
        points=rows.points[:, None],
        largest_k=0,
        has_min_p_or_top_k=True,
        has_top_p=True,
        bounded=False,
    )
