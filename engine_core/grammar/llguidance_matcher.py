"""Grammars in llguidance's own form, and the matcher of one answer.

llguidance computes in the threads for grammars. The engine waits a moment for it, and a matcher that is not
done by then is late: its sequence sits steps out until it is done, or has taken longer than it may.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, Literal

from llguidance import LLExecutor, LLMatcher, LLParserLimits

from engine_core.grammar.grammar_threads import GrammarJob, GrammarThreads
from engine_core.grammar.matcher import GrammarError, TokenMatcher
from engine_core.protocol import Grammar
from worker.protocol import Bound

LIMITS = LLParserLimits(
    max_items_in_row=8192, step_max_items=12_000, max_lexer_states=50_000, verbose_errors=False
)
"""The bounds of llguidance's work. Its errors do not repeat grammars and texts, which may be secret."""

TOKEN_SECONDS = 0.75
"""The most seconds of computing behind one token."""
ANSWER_SECONDS, SECONDS_EACH = 2.0, 0.02
"""The most seconds of computing for one answer: so many, and so many for each of its tokens."""

_log = logging.getLogger(__name__)

_QUICK = 0.002
"""Behind a bound that took less, a token is taken in less: taking it repeats a part of that work."""
_MOST_FORCED = 16


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


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar at its beginning, which is copied and never followed itself."""

    beginning: LLMatcher
    bits: bytes
    """The tokens that may come first."""
    seconds: float
    """How long it took to find them."""
    size: int
    """The bytes of such bits, as llguidance writes them into a buffer."""
    ends: int
    """The tokens that end answers, as a number of which each token has a bit."""
    nothing: LLMatcher
    """A matcher in an error: llguidance lets go of the interpreter's lock only if it follows two or more."""


class _TooComplex(Exception):
    """llguidance has given up."""


class GrammarMatcher:
    """Asleep until one of the grammar's `wakes` has been written, then awake until it is complete."""

    def __init__(
        self, compiled: Compiled, grammar: Grammar, vocab_size: int, threads: GrammarThreads, owner: str
    ) -> None:
        self.compiled = compiled
        self._wakes = grammar.wakes
        self.again = grammar.again
        self.vocab_size = vocab_size
        self._threads = threads
        self._owner = owner
        self._go_to(None if self._wakes else compiled)
        self.last: deque[int] = deque(maxlen=max(map(len, self._wakes), default=0))
        """The last tokens that were written while asleep."""
        self._count = 0
        self._complete = False
        self._job: GrammarJob[Any] | None = None
        """What is being computed with its place in the grammar, if the engine did not wait for it."""
        self._owed: deque[tuple[int, bool]] = deque()
        """The tokens to take behind that."""
        self._spent = 0.0
        """The seconds of computing so far; those behind the last token are `_slowest`."""

    @property
    def complete(self) -> bool:
        return self._complete

    @property
    def binds(self) -> bool:
        return not self._complete

    @property
    def late(self) -> bool:
        return self._job is not None

    def take(self, token: int, *, wakes: bool = True) -> None:
        if self._job is not None:
            self._owed.append((token, wakes))
            return
        self._count += 1
        if self.place is None:
            self._listen(token, wakes)
            return
        if self._complete or not _has(self.bits, token):
            raise GrammarError(f"the grammar of the answer does not allow output token {self._count}")
        quick = self._slowest < _QUICK
        nothing = None if quick else self.compiled.nothing
        self.seen.clear()
        job = self._threads.submit(self._owner, partial(_advance, self.place, token, nothing))
        self._slowest = 0.0
        if self._waits_for(job, self._threads.patience):
            self._arrive(job)

    def settle(self, wait: float = 0.0) -> bool:
        """Go on if what was late is done; returns whether it is. Raises GrammarError if it took too long."""
        while (job := self._job) is not None:
            if not job.done() and not (wait and job.wait(wait)):
                if job.run_for(time.monotonic()) > TOKEN_SECONDS:
                    self.abandon()
                    raise self._took_too_long()
                return False
            self._job = None
            if job.result is None or isinstance(job.result, bytes):
                self._arrive(job)
            else:
                self._count_time(job)
            while self._owed and self._job is None:
                token, wakes = self._owed.popleft()
                self.take(token, wakes=wakes)
        return True

    def abandon(self) -> None:
        """Let what is being computed go: the answer has ended."""
        if self._job is not None:
            self._threads.abandon(self._job)

    def bound(self) -> Bound | None:
        return None if self.place is None else bound_of(self.bits, self.vocab_size)

    def fork(self) -> TokenMatcher:
        return GrammarFork(self)

    def forced(self) -> list[int]:
        if self.place is None or self._complete or self._job is not None or self._only(self.bits) is None:
            return []
        bits, tokens = self.bits, list[int]()
        while len(tokens) < _MOST_FORCED and (token := self._only(bits)) is not None:
            tokens.append(token)
            try:
                bits = self.bits_behind(self.place, tokens, self.seen)
            except GrammarError:
                break
        return tokens

    def bits_behind(
        self, place: LLMatcher, tokens: Sequence[int], seen: dict[tuple[int, ...], bytes]
    ) -> bytes:
        """What may come behind allowed tokens. Raises GrammarError if it cannot be told now."""
        found = seen.get(tuple(tokens))
        if found is not None:
            return found
        if self._job is not None:
            raise GrammarError("an earlier place in the grammar is still being computed")
        size = self.compiled.size
        job = self._threads.submit(self._owner, partial(_look_ahead, place, list(tokens), size))
        if not self._waits_for(job, self._threads.patience):
            raise GrammarError("a later place in the grammar takes long to compute")
        self._count_time(job)
        if job.error is not None:
            raise _broken() from None
        for count, bits in enumerate(job.outcome(), 1):
            seen[tuple(tokens[:count])] = bits
        if tuple(tokens) not in seen:
            raise GrammarError("a later place in the grammar cannot be reached")
        return seen[tuple(tokens)]

    def _waits_for(self, job: GrammarJob[Any], patience: float) -> bool:
        """Whether it is done within the engine's patience; otherwise it is late."""
        if job.wait(patience):
            return True
        self._job = job
        job.rings = True
        if job.done():  # it may not have seen that
            self._job = None
            return True
        return False

    def _arrive(self, job: GrammarJob[Any]) -> None:
        """Take over what may come behind a token that was taken."""
        self._count_time(job)
        try:
            bits = job.outcome()
        except _TooComplex:
            raise self._too_complex() from None
        except Exception:
            raise _broken() from None
        if bits:
            self.bits = bits
        elif self.again:
            self._go_to(None)
        else:
            self._complete = True

    def _count_time(self, job: GrammarJob[Any]) -> None:
        self._slowest = max(self._slowest, job.seconds)
        self._spent += job.seconds
        if job.seconds > TOKEN_SECONDS or self._spent > ANSWER_SECONDS + SECONDS_EACH * self._count:
            raise self._took_too_long()

    def listens(self, last: deque[int], token: int, wakes: bool) -> bool:
        """Note a token that is written while asleep; returns whether the grammar begins behind it."""
        last.append(token)
        written = tuple(last)
        if wakes and any(written[-len(wake) :] == wake for wake in self._wakes):
            last.clear()
            return True
        return False

    def _listen(self, token: int, wakes: bool) -> None:
        if self.listens(self.last, token, wakes):
            self._go_to(self.compiled)

    def _go_to(self, compiled: Compiled | None) -> None:
        """Follow the text from the beginning of the grammar on; None: sleep."""
        self.place = None if compiled is None else compiled.beginning.deep_copy()
        self.bits = b"" if compiled is None else compiled.bits
        self._slowest = 0.0 if compiled is None else compiled.seconds
        self.seen: dict[tuple[int, ...], bytes] = {}
        """What may come behind tokens that may be next, as far as it was asked for."""

    def _only(self, bits: bytes) -> int | None:
        """The one token that is allowed, if it is one of the text."""
        allowed = int.from_bytes(bits, "little")
        if allowed.bit_count() != 1 or allowed & self.compiled.ends:
            return None
        token = allowed.bit_length() - 1
        return token if token < self.vocab_size else None

    def _too_complex(self) -> GrammarError:
        return GrammarError(
            f"the grammar of the answer became too complex at output token {self._count}: "
            "make it simpler, or its repetitions shorter"
        )

    def _took_too_long(self) -> GrammarError:
        return GrammarError(
            f"the grammar of the answer took longer to follow than it may, at output token {self._count}: "
            "make it simpler: fewer alternatives that begin alike, no rule that repeats itself in many ways"
        )


class GrammarFork:
    """Follows tokens that may come, without the matcher's own place being changed."""

    def __init__(self, matcher: GrammarMatcher) -> None:
        self._matcher = matcher
        self.compiled = matcher.compiled
        self.place, self.bits, self.seen = matcher.place, matcher.bits, matcher.seen
        self.last = matcher.last.copy()
        self._tokens: tuple[int, ...] = ()
        """The tokens that the fork has taken since its place in the grammar."""
        self._complete = matcher.complete

    @property
    def complete(self) -> bool:
        return self._complete

    @property
    def binds(self) -> bool:
        return not self._complete

    @property
    def late(self) -> bool:
        return False

    def settle(self, wait: float = 0.0) -> bool:
        return True

    def abandon(self) -> None: ...

    def take(self, token: int, *, wakes: bool = True) -> None:
        if self.place is None:
            if self._matcher.listens(self.last, token, wakes):
                self.place, self.bits = self.compiled.beginning.deep_copy(), self.compiled.bits
                self.seen, self._tokens = {}, ()
            return
        if self._complete or not _has(self.bits, token):
            raise GrammarError("the grammar of the answer does not allow this token")
        self._tokens = (*self._tokens, token)
        self.bits = self._matcher.bits_behind(self.place, self._tokens, self.seen)
        if not int.from_bytes(self.bits, "little") & ~self.compiled.ends:
            if self._matcher.again:
                self.place = None
            else:
                self._complete = True

    def bound(self) -> Bound | None:
        return None if self.place is None else bound_of(self.bits, self._matcher.vocab_size)

    def fork(self) -> GrammarFork:
        fork = copy(self)
        fork.last = self.last.copy()
        return fork

    def forced(self) -> list[int]:
        return []


def _advance(
    place: LLMatcher, token: int, nothing: LLMatcher | None, job: GrammarJob[bytes], executor: LLExecutor
) -> bytes:
    """Take an allowed token; returns what may come behind it, which is empty behind the end of the text."""
    if nothing is None:
        place.consume_token(token)
    else:
        executor.consume_token_par([(place, token), (nothing.deep_copy(), token)])
    if place.is_error():
        raise _TooComplex
    if place.is_stopped():
        return b""
    bits = place.compute_bitmask()
    if place.is_error():
        raise _TooComplex
    return bits


def _look_ahead(
    place: LLMatcher, tokens: list[int], size: int, job: GrammarJob[list[bytes]], executor: LLExecutor
) -> list[bytes]:
    """What may come behind each of these tokens, up to the first that may not come."""
    buffer = bytearray(size * (len(tokens) + 1))
    at = ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))
    executor.unsafe_compute_mask_ptr_with_draft_token([(place, 0, tokens)], at, size, len(tokens) + 1)
    rows = [bytes(buffer[size * row : size * (row + 1)]) for row in range(1, len(tokens) + 1)]
    return list(takewhile(any, rows))


def _broken() -> GrammarError:
    """Logs the error that is being handled, which is the engine's own and ends one answer."""
    _log.exception("a grammar could not be followed")
    return GrammarError("the grammar of the answer could not be followed")


def _has(bits: bytes, token: int) -> bool:
    at = token // 8
    return at < len(bits) and bool(bits[at] >> token % 8 & 1)


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
