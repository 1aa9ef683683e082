"""Compiles grammars in a thread of its own, and keeps what it has compiled.

llguidance lets go of the interpreter's lock while it compiles, so that the engine's steps go on. A thread and
not a process: a compiled grammar cannot be handed over, and whatever takes too long or too much memory has
been found out before by the server's process that checks grammars.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import tokenizers
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from engine_core.grammar import llguidance_matcher
from engine_core.grammar.llguidance_matcher import GrammarMatcher, llguidance_grammar
from engine_core.grammar.matcher import GrammarError
from engine_core.protocol import Grammar, Spelling

KEPT_BYTES = 64 << 20
"""The bytes that compiled grammars may take together, as far as they can be estimated."""

_BYTES_EACH, _BYTES_PER_CHARACTER = 128 << 10, 64
"""An estimate of what a compiled grammar takes, from above."""

_LONGEST_ERROR = 300


_log = logging.getLogger(__name__)

Compiled = LLMatcher | GrammarError
"""A grammar at its beginning, or why there is none."""


class GrammarCompiler:
    def __init__(self, spelling: Spelling, vocab_size: int, folder: str, on_done: Callable[[], None]) -> None:
        """`on_done` is called from the thread whenever a grammar is compiled."""
        self._vocab_size = vocab_size
        self._on_done = on_done
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._vocabulary = self._thread.submit(_make_vocabulary, spelling, vocab_size, folder)
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

    def matcher(self, compiled: Compiled, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the beginning of a compiled grammar. Raises GrammarError if it is none."""
        if isinstance(compiled, GrammarError):
            raise GrammarError(*compiled.args)  # a new one: those that are kept would gather tracebacks
        return GrammarMatcher(compiled, grammar, self._vocab_size)

    def stop(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _compile(vocabulary: Future[LLTokenizer], grammar: Grammar) -> Compiled:
    text = llguidance_grammar(grammar.kind, grammar.text)
    compiled = LLMatcher(vocabulary.result(), text, limits=llguidance_matcher.LIMITS, log_level=0)
    # Most of the lexer's work is done for the first bound, and shared by all copies.
    first = compiled.deep_copy()
    if not first.is_error():
        first.compute_bitmask()
    if first.is_error():
        return GrammarError(f"the grammar of the answer cannot be used: {_in_short(first.get_error())}")
    return compiled


def _in_short(error: str) -> str:
    """The first line of an error without the remark that it could be longer; a bare name says nothing."""
    line = error.replace("<non-verbose/>", "").strip().partition("\n")[0].strip()
    return line[:_LONGEST_ERROR] if " " in line else "it allows no text"


def _make_vocabulary(spelling: Spelling, size: int, folder: str) -> LLTokenizer:
    """The vocabulary of a model with so many tokens. It takes a second for a hundred thousand of them.

    `folder` is the checkpoint's on this machine, in case the server's tokenizer.json is on another one. If
    the model has no token that ends an answer, one is added behind all others.
    """
    tokens = [*spelling.tokens[:size], *[b""] * (size - len(spelling.tokens))]
    special, ends = [id for id in spelling.special if id < size], [id for id in spelling.ends if id < size]
    if not ends:
        ends = [size]
        special.append(size)
        tokens.append(b"</s>")
    encoder = _Encoder(_open_tokenizer(spelling.tokenizer, folder), tokens, special, ends[0])
    return LLTokenizer(encoder, eos_token=ends)


def _open_tokenizer(path: str, folder: str) -> tokenizers.Tokenizer | None:
    for found in (Path(path), Path(folder) / "tokenizer.json"):
        if found.is_file():
            tokenizer = tokenizers.Tokenizer.from_file(str(found))
            tokenizer.no_truncation()
            tokenizer.no_padding()
            tokenizer.encode_special_tokens = True  # a text may spell the name of one
            return tokenizer
    _log.warning("there is no tokenizer.json here: under a grammar, words may be cut in unusual places")
    return None


class _Encoder(TokenizerWrapper):
    """What llguidance asks of a tokenizer: its tokens, and the ids of a text.

    Where a grammar leaves no choice of bytes, llguidance lets through only the tokens that the model's own
    tokenizer makes of them.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer | None, tokens: list[bytes], special: list[int], end: int
    ) -> None:
        self.is_tokenizer_wrapper = True
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end
        self.bos_token_id = None
        self._tokenizer = tokenizer
        self._own: dict[bytes, int] = {}
        if tokenizer is None:
            hidden = set(special)
            self._own = {data: id for id, data in enumerate(tokens) if data and id not in hidden}
            self._longest = max(map(len, self._own), default=0)

    def __call__(self, s: str) -> list[int]:
        if self._tokenizer is not None:
            return self._tokenizer.encode(s, add_special_tokens=False).ids
        return self._longest_first(s.encode())

    def _longest_first(self, data: bytes) -> list[int]:
        """The text in the longest tokens from its beginning on, which any grammar can follow."""
        ids: list[int] = []
        while data:
            cuts = range(min(self._longest, len(data)), 0, -1)
            cut = next((cut for cut in cuts if data[:cut] in self._own), None)
            if cut is None:
                return ids  # a byte that no token has
            ids.append(self._own[data[:cut]])
            data = data[cut:]
        return ids
