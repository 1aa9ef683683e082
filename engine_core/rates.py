"""How fast an engine works, and how long its answers get: what servers and engines compute waits from."""

from __future__ import annotations

from math import expm1

import msgspec


class Rates(msgspec.Struct, frozen=True, gc=False):
    """How fast an engine works while it has more to do than it can do at once."""

    prompt_rate: float
    """The tokens of prompts that it computes in a second of nothing else."""
    step: float
    """The seconds of a step in which all running sequences get a token, without prompts."""
    step_rows: float
    """The sequences that get a token in such a step."""
    step_prompts: float
    """The tokens of prompts that fit into a step beside them."""
    stop_rate: float
    """The chance of a token to be the last of its answer."""

    def seconds(self, prompts: float, answers: float) -> float:
        """The time that so many tokens of prompts and of answers take."""
        steps = max(prompts / self.step_prompts, answers / self.step_rows)
        return prompts / self.prompt_rate + steps * self.step


def expected_length(most: float, stop_rate: float) -> float:
    """The tokens of an answer that has `most` at most, and ends after each of them with this chance."""
    if stop_rate * most < 1e-6:
        return most
    return -expm1(-stop_rate * most) / stop_rate
