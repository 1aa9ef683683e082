"""Limits how long a step may take, between what readers of streams bear and how long newcomers wait."""

from __future__ import annotations

from math import inf

from engine_core.config import EngineConfig
from engine_core.scheduling.step_time_estimate import StepTime
from worker.worker_facts import WorkerFacts

_GAP, _WIDEST_GAP = 0.05, 0.22
"""The default gap between two tokens of a stream while no newcomer waits, and while many do: nobody reads
faster than ten tokens a second."""
_DECODING_STEPS = 4
"""The default gap is at least so many times what the rows that decode take: less would leave too little time
for prompts, and more for streams than waiting requests pay for."""
_GROWTH = 0.4
"""The part of the time that prompts of newcomers will take by which the default gap grows. So all of them are
read in some three steps, and the weights are not read once more for each of many small chunks."""
_LEAST_PART = 0.25
"""The part that prompts get of a gap, even if decoding rows alone take longer, or they would starve."""
_ENOUGH_TOKENS = 512
"""Tokens that use a processor fully: with more in a step each takes as long, and who comes waits longer."""
_PROMPTS_SHARE = 1.5
"""A step that reads all prompts takes so many times as long beside texts, which get a third of it."""
_STEPS_OF_NEWCOMER = 1.5
"""Steps for which a newcomer beside background work waits: half of one that runs, on average, and its own."""


class StepTimeLimit:
    """Says how much prompts and texts get of a step beside the rows that decode. Times are in seconds."""

    def __init__(self, config: EngineConfig, facts: WorkerFacts, step_time: StepTime) -> None:
        self.readers = 0
        """Sequences whose tokens somebody reads as they come."""
        self.background = 0
        """Sequences of background work, waiting or running."""
        self._step_time = step_time
        self._most_tokens = facts.max_num_batched_tokens
        asked, on_cpu = config.max_token_gap_ms, facts.device == "cpu"
        self._asked = None if asked is None else asked / 1000
        self._is_bounded = bool(asked) or (asked is None and on_cpu)
        self._is_brief = asked != 0 and on_cpu and "generate" in facts.tasks
        """Whether steps have no more tokens than use a processor fully, though nobody reads: somebody may
        come who waits for a first token."""

    @property
    def is_bounded(self) -> bool:
        """Whether the next step has to end soon, for readers or for who may come beside background work."""
        return self._is_bounded and bool(self.readers or self.background)

    def left(self, decoding: float, newcomers: float) -> float:
        """Tell what can be added to a step whose decoding rows take so long, itself included.

        `newcomers`: what the prompts of those will take who wait for their first token.
        """
        step_time = self._step_time
        if self.is_bounded:
            gap = self._gap(decoding, newcomers) / (_STEPS_OF_NEWCOMER if self.background else 1)
            least = gap * _LEAST_PART
            if self._asked is None:  # no step reads the weights for a few tokens of a prompt
                least = max(least, step_time.step)
            return max(gap - decoding, least)
        if not self._is_brief:
            return inf
        left = max(step_time.tokens(_ENOUGH_TOKENS, 0), step_time.step)
        if newcomers > step_time.tokens(1, 0):
            # Texts that share the step make first tokens later: they get what is left of a gap.
            left = min(left, max(_PROMPTS_SHARE * newcomers, self._gap(decoding, 0.0) - decoding))
        return left

    def most_for_prompts(self, decoding: float, newcomers: float) -> float:
        """Tell what prompts get of each such step, under both bounds, if there are enough of them."""
        tokens = min(self._most_tokens, _ENOUGH_TOKENS) if self._is_brief else self._most_tokens
        most = self._step_time.tokens(tokens, 0)
        return min(most, self.left(decoding, newcomers)) if self.is_bounded else most

    def _gap(self, decoding: float, newcomers: float) -> float:
        """Tell what a step is to take beside streams, so that nearly all of them end within the gap."""
        step_time, gap = self._step_time, self._asked
        if gap is None:
            single = step_time.single
            gap = max(_GAP, _DECODING_STEPS * (single if self.background else max(decoding, single)))
            gap = max(gap, min(_WIDEST_GAP, gap + _GROWTH * newcomers))
        return gap / step_time.margin
