"""When engines that share experts want a step computed in two halves, and where they cut it (`--enable-dbo`).

While the tokens of one half travel between ranks, the other half is computed. All engines of a round compute
halves, or none does: one that has too few tokens, or none at all, keeps the others from it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from engine_core.config import EngineConfig
from worker.protocol import StepInput, WorkerFacts

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Halving:
    """The sizes from which this engine wants its steps in halves."""

    decode_tokens: int
    """The fewest tokens of a step in which no prompt is read."""
    prompt_tokens: int
    """The fewest tokens of prompts in another step."""

    @classmethod
    def asked_for(cls, config: EngineConfig) -> Halving | None:
        """The sizes that an operator has asked for, if steps are to have halves at all."""
        if not config.enable_dbo:
            return None
        return cls(config.dbo_decode_token_threshold, config.dbo_prefill_token_threshold)

    def first_half(self, step: StepInput) -> int:
        """The tokens of the first half of a step; 0 if it should stay whole."""
        counts = [seq.count for seq in step.seqs]
        of_prompts = sum(count for count in counts if count > 1)
        enough = of_prompts >= self.prompt_tokens if of_prompts else len(counts) >= self.decode_tokens
        return _middle(counts) if enough and sum(counts) > 1 else 0

    def usable(self, facts: WorkerFacts) -> Halving | None:
        """This, if workers can compute halves. The log says where that is no use."""
        if not facts.causal:
            _log.warning("--enable-dbo does nothing: texts of an encoder are computed in whole steps")
            return None
        if facts.device == "cpu":
            _log.warning(
                "--enable-dbo gains nothing here: on a CPU, tokens travel between workers of this machine by "
                "the cores that compute"
            )
        return self


def _middle(counts: Sequence[int]) -> int:
    """The tokens before the row border next to the middle, or before the middle if that is far away."""
    total = sum(counts)
    border = min(accumulate(counts[:-1]), key=lambda at: abs(2 * at - total), default=0)
    is_near = border and 4 * abs(2 * border - total) <= total  # an eighth of all tokens
    return border if is_near else total // 2
