"""Compiles grammars in a thread of its own, and keeps what it has compiled.

llguidance lets go of the interpreter's lock while it compiles, so that the engine's steps go on. A thread and
not a process: a compiled grammar cannot be handed over, and whatever takes too long or too much memory has
been found out by the server's prover before (server/offload/).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from llguidance import LLMatcher, LLTokenizer

from engine_core.grammar import limits
from engine_core.grammar.limits import as_llguidance
from engine_core.grammar.spelling import make_vocabulary
from engine_core.grammar.walker import GrammarWalker
from engine_core.protocol import Grammar, Spelling
from engine_core.walking.walker import GrammarError

KEPT_BYTES = 64 << 20
"""The bytes that compiled grammars may take together, as far as they can be estimated."""

_BYTES_EACH, _BYTES_PER_CHARACTER = 128 << 10, 64
"""An estimate of what a compiled grammar takes, from above."""

_LONGEST_ERROR = 300


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar at its beginning, or why there is none."""

    matcher: LLMatcher | None
    error: str = ""


class Forge:
    def __init__(self, spelling: Spelling, vocab_size: int, folder: str, on_done: Callable[[], None]) -> None:
        """`on_done` is called from the thread whenever a grammar is compiled."""
        self._vocab_size = vocab_size
        self._on_done = on_done
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._vocabulary = self._thread.submit(make_vocabulary, spelling, vocab_size, folder)
        self._kept: OrderedDict[bytes, tuple[Future[Compiled], int]] = OrderedDict()
        """What is compiled or being compiled, by digest, the one used last at the end; with its bytes."""
        self._kept_bytes = 0

    def compile(self, grammar: Grammar) -> Future[Compiled]:
        """The compiled grammar, which may be there already."""
        digest = hashlib.sha256(f"{grammar.kind} {grammar.text}".encode("utf-8", "surrogatepass")).digest()
        if (known := self._kept.get(digest)) is not None:
            self._kept.move_to_end(digest)
            return known[0]
        compiled = self._thread.submit(_compile, self._vocabulary, grammar)
        compiled.add_done_callback(lambda _: self._on_done())
        size = _BYTES_EACH + _BYTES_PER_CHARACTER * len(grammar.text)
        self._kept[digest] = compiled, size
        self._kept_bytes += size
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._kept_bytes -= dropped
        return compiled

    def walker(self, compiled: Compiled, grammar: Grammar) -> GrammarWalker:
        """A walker at the beginning of a compiled grammar. Raises GrammarError if it is none."""
        if compiled.matcher is None:
            raise GrammarError(compiled.error)
        return GrammarWalker(compiled.matcher, grammar, self._vocab_size)

    def stop(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _compile(vocabulary: Future[LLTokenizer], grammar: Grammar) -> Compiled:
    text = as_llguidance(grammar.kind, grammar.text)
    matcher = LLMatcher(vocabulary.result(), text, limits=limits.LIMITS, log_level=0)
    if not matcher.is_error():
        # Most of the lexer's work is done for the first bound, and shared by all copies.
        first = matcher.deep_copy()
        first.compute_bitmask()
        if not first.is_error():
            return Compiled(matcher)
        matcher = first
    return Compiled(None, f"the grammar of the answer cannot be used: {_in_short(matcher.get_error())}")


def _in_short(error: str) -> str:
    """The first line of an error without the remark that it could be longer; a bare name says nothing."""
    line = error.replace("<non-verbose/>", "").strip().partition("\n")[0].strip()
    return line[:_LONGEST_ERROR] if " " in line else "it allows no text"
