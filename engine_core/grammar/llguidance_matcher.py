"""Grammars in llguidance's own form, and the matcher of one answer."""

from __future__ import annotations

from collections import deque
from copy import copy
from itertools import takewhile
from typing import Literal

from llguidance import LLMatcher, LLParserLimits

from engine_core.grammar.matcher import GrammarError
from engine_core.protocol import Grammar
from worker.protocol import Bound

LIMITS = LLParserLimits(max_items_in_row=8192, max_lexer_states=50_000, verbose_errors=False)
"""The bounds of llguidance's work. Its errors do not repeat grammars and texts, which may be secret."""

_MOST_BEHIND = 64
"""A copy that is so many tokens behind is made anew, which takes as long in a long text."""


def llguidance_grammar(kind: Literal["json", "regex", "lark", "llguidance"], text: str) -> str:
    """The grammar of `Grammar.kind` and `Grammar.text` in llguidance's own form."""
    match kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(text)
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "lark":
            return LLMatcher.grammar_from_lark(text)
        case "llguidance":
            return text


class _Ahead:
    """A copy of a place in a grammar that goes ahead of it, and comes back: to copy it anew takes longer."""

    def __init__(self) -> None:
        self._copy: LLMatcher | None = None
        self.taken: list[int] = []
        self.taken_ahead: list[int] = []
        """What the place, and what its copy has taken since the two were last the same."""

    def lend(self, position: LLMatcher) -> LLMatcher:
        """The copy, after it was brought to the place."""
        pairs = zip(self.taken, self.taken_ahead, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        back, more = len(self.taken_ahead) - same, self.taken[same:]
        copy = self._copy
        behind = copy is None or len(more) > _MOST_BEHIND or (back > 0 and not copy.rollback(back))
        if copy is None or behind or not copy.consume_tokens(more):
            copy = self._copy = position.deep_copy()
        self.taken.clear()
        self.taken_ahead.clear()
        return copy


class GrammarMatcher:
    """Asleep until one of the grammar's `wakes` has been written, then awake until it is complete."""

    def __init__(self, compiled: LLMatcher, grammar: Grammar, vocab_size: int) -> None:
        """`compiled` is at the beginning of the grammar, and copied where this one begins it."""
        self._compiled = compiled
        self._wakes = grammar.wakes
        self._again = grammar.again
        self._vocab_size = vocab_size
        self._go_to(None if self._wakes else compiled.deep_copy())
        self._last: deque[int] = deque(maxlen=max(map(len, self._wakes), default=0))
        """The last tokens that were written while asleep."""
        self._count = 0
        self._complete = False

    @property
    def complete(self) -> bool:
        return self._complete

    @property
    def binds(self) -> bool:
        return not self._complete

    def take(self, token: int, *, wakes: bool = True) -> None:
        self._count += 1
        if self._position is None:
            self._listen(token, wakes)
            return
        if not self._position.try_consume_tokens([token]):
            raise self._error(self._position, self._count)
        self._taken.append(token)
        if self._position.is_stopped():
            self._finish(self._position)

    def bound(self) -> Bound | None:
        if self._position is None:
            return None
        bits = self._position.compute_bitmask()
        if self._position.is_error():
            raise self._error(self._position, self._count + 1)
        return bound_of(bits, self._vocab_size)

    def fork(self) -> GrammarMatcher:
        fork = copy(self)
        fork._last = self._last.copy()
        if self._position is not None:
            fork._go_to(self._ahead.lend(self._position))
            fork._taken = self._ahead.taken_ahead
        return fork

    def _go_to(self, position: LLMatcher | None) -> None:
        """Follow the text from another place in the grammar on; None: sleep."""
        self._position, self._ahead = position, _Ahead()
        self._taken = self._ahead.taken

    def forced(self) -> list[int]:
        if self._position is None or self._complete:
            return []
        tokens = self._position.compute_ff_tokens()
        return list(takewhile(lambda token: token < self._vocab_size, tokens))

    def _listen(self, token: int, wakes: bool) -> None:
        """Wake up if this token completes a sequence that wakes, and may."""
        self._last.append(token)
        written = tuple(self._last)
        if wakes and any(written[-len(wake) :] == wake for wake in self._wakes):
            self._last.clear()
            self._go_to(self._compiled.deep_copy())

    def _finish(self, position: LLMatcher) -> None:
        if position.is_error():
            raise self._error(position, self._count)
        if self._again:
            self._go_to(None)
        else:
            self._complete = True

    def _error(self, position: LLMatcher, at: int) -> GrammarError:
        if not position.is_error():
            return GrammarError(f"the grammar of the answer does not allow output token {at}")
        return GrammarError(
            f"the grammar of the answer became too complex at output token {at}: "
            "make it simpler, or its repetitions shorter"
        )


def bound_of(bits: bytes, size: int) -> Bound:
    """The allowed tokens of a vocabulary of `size`. Bits beyond it are dropped."""
    whole, rest = divmod(size, 32)
    data = bits[: 4 * whole]
    if rest:
        last = int.from_bytes(bits[4 * whole : 4 * whole + 4], "little") & ((1 << rest) - 1)
        data += last.to_bytes(4, "little")
    if not data.lstrip(b"\0"):
        raise GrammarError("the grammar of the answer allows no token of this model")
    return Bound("bits", data)
