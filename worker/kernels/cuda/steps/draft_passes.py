"""Passes of a drafter as graphs: over the step that was replayed before, and over its own single tokens.

A drafter reads the layout of mixed steps, where graphs of the served model have left it, or lays out its own
steps there. So a pass has the sizes of these steps, and is recorded before them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from models.context import context, use_context
from models.model import Forward
from worker.kernels.cuda.steps.graph_capture import Missing, Recorder
from worker.kernels.cuda.steps.mixed_step import MixedStep
from worker.steps.compute import UnreadStep
from worker.steps.feature import Passes
from worker.tables.positions import Columns, LayOut, StepTokens
from worker.tables.slots import Slots
from worker.tables.staging import Packet


@dataclass(frozen=True, slots=True)
class PassForm:
    """The form of a pass of the drafter over up to so many tokens."""

    tokens: int


def is_pass_of(form: object, most: int) -> bool:
    """Whether a form is that of a pass over at most so many tokens."""
    return isinstance(form, PassForm) and form.tokens <= most


@dataclass(frozen=True, slots=True)
class _Pass:
    hidden: Tensor  # [T, width]
    stream: Tensor | None  # [T, width]: what is read beside tokens
    replay: Callable[[], None]
    step: MixedStep


class DraftPasses:
    def __init__(
        self,
        drafter: Passes | None,
        open_recorder: Callable[[], Recorder],
        lay_out: LayOut,
        place_of: Callable[[int], MixedStep],
    ) -> None:
        """`lay_out` serves steps without a graph; `place_of` finds the place of steps of so many tokens."""
        self._drafter, self._lay_out, self._place_of = drafter, lay_out, place_of
        self._made: dict[int, _Pass] = {}
        self._forward: Forward | None = None
        self.are_made = drafter is not None
        self._recorder = open_recorder() if self.are_made else None
        if drafter is not None:
            drafter.quicken(self._lay_out_pass, self._record)

    def follow(self, tokens: int) -> bool:
        """Whether a pass can follow a replayed step of this size; if there are none, nothing need follow."""
        return not self.are_made or tokens in self._made

    def make(self, form: PassForm) -> Missing | None:
        """Record a pass; returns why, if there is none."""
        drafter, forward, recorder = self._drafter, self._forward, self._recorder
        if drafter is None or forward is None or recorder is None:
            return None
        stream, step = drafter.make_stream(form.tokens), self._place_of(form.tokens)

        def open_work() -> Callable[[], Tensor]:
            step.clear()
            ids, laid_out = step.lay_out()

            def work() -> Tensor:
                with use_context(laid_out):
                    return forward(ids, laid_out.positions, stream)

            return work

        made = recorder.record(open_work)
        if isinstance(made, Missing):
            return made
        self._made[form.tokens] = _Pass(made.result, stream, made.replay, step)
        return None

    def close(self) -> None:
        self._made.clear()

    def _record(self, forward: Forward) -> Forward:
        self._forward = forward

        def replayed(ids: Tensor, positions: Tensor, stream: Tensor | None) -> Tensor:
            made = self._made.get(len(positions)) if isinstance(context(), UnreadStep) else None
            if made is None:
                return forward(ids, positions, stream)
            if stream is not None and made.stream is not None:
                made.stream[: len(ids)] = stream
            made.replay()
            return made.hidden[: len(ids)]

        return replayed

    def _lay_out_pass(self, columns: Columns, slots: Slots, packet: Packet) -> Callable[[], StepTokens]:
        """The `LayOut` of the drafter's own steps, in the smallest place that has a graph and room."""
        count, rows = columns.query_starts[-1], len(columns.slots)
        for size in sorted(self._made):
            step = self._made[size].step
            if count <= size and rows <= step.rows:
                finish = step.stage(columns, (), packet)
                return lambda: (step.lay_out(), finish())[1]
        return self._lay_out(columns, slots, packet)
