"""A guesser that guesses at random, and knows what is right. It checks what it is told."""

import random
from collections.abc import Collection
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake_worker import VOCAB, text_after
from msgspec.structs import replace
from toy_language import next_token

from engine_core import resolve_checkpoint
from engine_core.config import EngineConfig
from engine_core.engine_stats import GuessTotals
from engine_core.features import installed
from engine_core.features.grammar.answer_bounds import AnswerBounds
from engine_core.features.speculation import drafts
from engine_core.grammar.matcher import GrammarError, TokenMatcher
from engine_core.options.speculation_options import SpeculationOptions
from engine_core.scheduling.scheduler import Scheduler
from engine_core.scheduling.sequence import Sequence


@dataclass
class ScriptedGuesser:
    random: random.Random
    most: int = 6
    chance: float = 0.7
    """How often a token that is guessed is the right one."""
    known: dict[Sequence, list[int]] = field(default_factory=dict)
    drafts: int = 0
    guessed: int = 0
    held: list[int] = field(default_factory=list)
    core: Scheduler | None = None

    @property
    def matchers(self) -> dict[Sequence, TokenMatcher]:
        assert self.core is not None
        return self.core.hooks.get(AnswerBounds).matchers

    @property
    def totals(self) -> GuessTotals:
        return GuessTotals(self.drafts, self.guessed, self.held)

    def enter(self, seq: Sequence) -> None:
        assert seq not in self.known and len(seq.tokens) > seq.prompt_len and not seq.done
        self.known[seq] = list(seq.tokens)

    def follow(self, seq: Sequence, count: int) -> None:
        self.known[seq] += seq.tokens[-count:]
        assert self.known[seq] == seq.tokens

    def leave(self, seq: Sequence) -> None:
        assert self.known.pop(seq) == seq.tokens

    def pays(self, seqs: Collection[Sequence]) -> bool:
        return self.random.random() < 0.8

    def choose(self, seqs: Ordered[Sequence], most_rows: int) -> dict[Sequence, list[int]]:
        """Guesses for some of these, also more than may be sampled before the limit."""
        left, chosen = most_rows - len(seqs), dict[Sequence, list[int]]()
        assert left > 0 and all(not seq.pools for seq in seqs)
        for seq in seqs:
            if seq in self.known and (count := min(left, self.random.randint(0, self.most))):
                chosen[seq] = self.guess(seq, count)
                left -= count
        return {seq: guesses for seq, guesses in chosen.items() if guesses}

    def guess(self, seq: Sequence, count: int) -> list[int]:
        text = list(seq.tokens)
        ahead = self.matchers[seq].fork() if seq.is_followed else None
        for _ in range(count):
            token = self.random.randrange(VOCAB)
            right = self.random.random() < self.chance
            try:
                if right:
                    token = text_after(text) if ahead is None else next_token(text, ahead)
                if ahead is not None:
                    ahead.take(token)
                    ahead = None if ahead.complete else ahead
            except GrammarError:
                ahead = None  # what follows cannot hold
            text.append(token)
        return text[len(seq.tokens) :]

    def landed(self, seq: Sequence, guessed: int, held: int) -> None:
        assert 0 <= held <= guessed and guessed
        self.drafts += 1
        self.guessed += guessed
        self.held += [0] * (held - len(self.held))
        for at in range(held):
            self.held[at] += 1


def use(monkeypatch: pytest.MonkeyPatch, guesser: ScriptedGuesser) -> None:
    """Let schedulers that are made from now on ask this guesser."""

    def options(config: EngineConfig) -> SpeculationOptions:
        return SpeculationOptions(method="ngram", most=guesser.most)

    def made(config: EngineConfig, *given: Any) -> drafts.Drafts | None:
        guesser.core = given[1]
        return make_drafts(replace(config, speculative_config={"method": "ngram"}), *given)

    make_drafts = drafts.make_drafts  # which guesses unasked on CPUs only
    monkeypatch.setattr(installed, "make_drafts", made)
    monkeypatch.setattr(drafts, "read_guess_options", options)
    monkeypatch.setattr(resolve_checkpoint, "read_guess_options", options)
    monkeypatch.setattr(drafts, "Speculator", lambda *given: guesser)
