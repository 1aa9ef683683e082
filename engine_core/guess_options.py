"""What an operator asks of guesses: who makes them, and how many at most."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine_core.config import EngineConfig

Method = Literal["ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa", "mtp"]
"""The ways to guess the next tokens: from earlier text, or by a smaller model."""


class GuessOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `--speculative-config` that count, all resolved."""

    method: Method
    most: int
    """The most tokens that are guessed for a sequence at a time."""
    least_match: int = 2
    most_match: int = 5
    """The fewest and the most tokens that must have come before as they do now, for `ngram`."""
    suffix_depth: int = 24
    """The most tokens of a match, for `suffix`."""
    suffix_bytes: int = 64 << 20
    """The memory in which `suffix` keeps earlier answers."""
    most_sequences: int | None = None
    """The most sequences that run while tokens are guessed, if the operator bounds them."""


def read_guess_options(config: EngineConfig) -> GuessOptions | None:
    """The options of an engine that guesses tokens; None if it shall not."""
    return None
