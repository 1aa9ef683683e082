"""A small language of tokens, its matchers, and the text that a FakeWorker writes in it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from fake_drafts import nearest
from fake_worker import VOCAB, allowed_ids, text_after

from engine_core.grammar.matcher import GrammarError, TokenMatcher
from worker.protocol import Bound

FORMS: tuple[Literal["bits", "allowed", "forbidden"], ...] = ("bits", "allowed", "forbidden")


def bound_of(allowed: Sequence[int], vocab: int, form: Literal["bits", "allowed", "forbidden"]) -> Bound:
    """A bound with these tokens, in any of its forms."""
    if form == "bits":
        every = np.zeros(-(-vocab // 32) * 32, np.uint8)
        every[list(allowed)] = 1
        return Bound("bits", np.packbits(every, bitorder="little").tobytes())
    ids = allowed if form == "allowed" else sorted(set(range(vocab)) - set(allowed))
    return Bound(form, array("i", ids).tobytes())


@dataclass(frozen=True)
class Language:
    """Texts in which each token leaves a few that may come next, and some tokens end."""

    vocab: int = VOCAB
    width: int = 4
    """The tokens that may come next, at most."""
    shortest: int = 3
    wakes: int | None = None
    """The token behind which the text begins; None: it begins at once."""
    breaks: int = 0
    """The token of the text, counted from 1, behind which matchers give up; 0: none."""

    def written(self, tokens: Sequence[int]) -> list[int] | None:
        """The part of an answer that is in the language; None if it has not begun."""
        if self.wakes is None:
            return list(tokens)
        return list(tokens[tokens.index(self.wakes) + 1 :]) if self.wakes in tokens else None

    def allowed(self, text: Sequence[int]) -> list[int]:
        """What may come next."""
        last = text[-1] if text else 0
        return sorted({(7 * last + 3 * len(text) + 5 * i + 1) % self.vocab for i in range(self.width)})

    def complete(self, text: Sequence[int]) -> bool:
        return len(text) >= self.shortest and text[-1] % 5 == 0

    def holds(self, tokens: Sequence[int]) -> bool:
        """Whether an answer is in the language, or the beginning of one that is."""
        text = self.written(tokens) or []
        steps = [text[:count] for count in range(len(text))]
        return all(
            token in self.allowed(before) and not self.complete(before)
            for before, token in zip(steps, text, strict=True)
        )

    def reference(self, prompt: Sequence[int], most: int) -> list[int]:
        """The answer that a FakeWorker gives within the bounds of this language, when it runs alone."""
        answer: list[int] = []
        while len(answer) < most:
            token, text = text_after([*prompt, *answer]), self.written(answer)
            if text is not None:
                allowed = self.allowed(text)
                token = token if token in allowed else allowed[token % len(allowed)]
            answer.append(token)
            if text is not None and self.complete([*text, token]):
                break
        return answer


@dataclass
class ToyMatcher:
    language: Language
    taken: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    """The numbers of tokens that it had taken when it was asked for bounds."""
    slow: frozenset[int] = frozenset()
    """The numbers of tokens behind which it is late."""
    looks: int = 0
    """How often it is looked at until it is late no more."""

    def take(self, token: int, *, wakes: bool = True) -> None:
        assert not self.late, "a token comes before the one before it is settled"
        assert not self.complete, "a token comes behind the end"
        text = self.language.written(self.taken)
        self.taken.append(token if text is not None or wakes else -1)
        if text is not None and token not in self.language.allowed(text):
            raise GrammarError("the token does not fit")
        if text is not None and len(text) + 1 == self.language.breaks:
            raise GrammarError("it became too complex")
        if len(self.taken) in self.slow:
            self.looks = 3

    def bound(self) -> Bound | None:
        assert not self.late, "nothing is known of what comes next"
        assert not self.complete, "nothing comes behind the end"
        self.asked.append(len(self.taken))
        text = self.language.written(self.taken)
        if text is None:
            return None
        if len(text) + 1 == -self.language.breaks:
            raise GrammarError("no bounds can be made")
        return bound_of(self.language.allowed(text), self.language.vocab, FORMS[len(text) % 3])

    @property
    def complete(self) -> bool:
        text = self.language.written(self.taken)
        return text is not None and not self.late and self.language.complete(text)

    @property
    def binds(self) -> bool:
        return True

    @property
    def late(self) -> bool:
        return self.looks > 0

    def settle(self, wait: float = 0.0) -> bool:
        self.looks = 0 if wait else max(0, self.looks - 1)
        return not self.looks

    def abandon(self) -> None: ...

    def fork(self) -> ToyMatcher:
        return ToyMatcher(self.language, list(self.taken))

    def forced(self) -> list[int]:
        found: list[int] = []
        text = self.language.written(self.taken)
        while text is not None and len(found) < 5 and not self.language.complete([*text, *found]):
            allowed = self.language.allowed([*text, *found])
            if len(allowed) > 1:
                break
            found += allowed
        return found


def written_alone(prompt: Sequence[int], most: int, matcher: TokenMatcher) -> list[int]:
    """The answer that a FakeWorker gives within the bounds of a matcher, token by token."""
    answer: list[int] = []
    while len(answer) < most and not matcher.complete:
        answer.append(next_token([*prompt, *answer], matcher))
        matcher.take(answer[-1])
    return answer


def next_token(tokens: Sequence[int], matcher: TokenMatcher) -> int:
    """The token that a FakeWorker samples within the bounds of a matcher."""
    return nearest(text_after(tokens), allowed_ids(matcher.bound()))
