"""What a beam search is asked for, and the answers that it finds."""

from __future__ import annotations

from typing import Literal

import msgspec

from worker.protocol import TokenLogprobs


class BeamParams(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A search for the likeliest answers, of which the best few are followed at a time."""

    width: int
    """The number of answers that are followed."""
    answers: int = 1
    """The number of answers that are wanted, the best of those that were found."""
    length_penalty: float = 1.0
    """An answer's score is the sum of its logprobs by its length, the prompt's included, to this power."""
    early_stopping: bool = False
    """Whether the search ends with as many ended answers as it follows, though better ones may be found."""
    logprobs: int | None = None
    """The number of most likely tokens to report beside each token; -1 is the whole vocabulary."""

    @property
    def candidates(self) -> int:
        """The number of tokens with which each answer may go on: half of them may end it."""
        return 2 * self.width


class Beam(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One of the answers that a beam search has found."""

    tokens: list[int]
    """The stop token is included, as the last one."""
    total: float
    """The sum of the logprobs of its tokens."""
    finish: Literal["stop", "length"]
    logprobs: list[TokenLogprobs] = []
    """An entry for each token, if asked for."""
