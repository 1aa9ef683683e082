"""Compiles grammars in threads, and keeps what it has compiled.

llguidance lets go of the interpreter's lock while it compiles, so that the engine's steps go on. Threads and
not processes: a compiled grammar cannot be handed over, and most of what takes too long or too much memory
has been found out before by the server's process that checks grammars.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from threading import Thread

import tokenizers
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

from engine_core.grammar import llguidance_matcher
from engine_core.grammar.grammar_threads import GrammarJob, GrammarThreads
from engine_core.grammar.llguidance_matcher import Compiled, GrammarMatcher, llguidance_grammar
from engine_core.grammar.matcher import GrammarError
from engine_core.protocol import Grammar, Spelling

KEPT_BYTES = 64 << 20
"""The bytes that compiled grammars may take together, as far as they can be estimated."""

_BYTES_EACH, _BYTES_PER_CHARACTER = 128 << 10, 64
"""An estimate of what a compiled grammar takes, from above."""

_LONGEST_ERROR = 300

COMPILE_SECONDS = 1.0
"""The most seconds that compiling one grammar may take."""
PATIENCE = 0.005
MOST_COMPILING = 2
"""The grammars that are compiled at a time, of different owners."""
MOST_FOLLOWING, MOST_FOLLOWING_BY_OWNER = 4, 2
"""The answers that are followed at a time, and those of one owner."""

_log = logging.getLogger(__name__)

Outcome = Compiled | GrammarError
"""A compiled grammar, or why there is none."""


class GrammarCompiler:
    def __init__(
        self,
        spelling: Spelling,
        vocab_size: int,
        folder: str,
        on_done: Callable[[], None],
        patience: float = PATIENCE,
    ) -> None:
        """`on_done` is called from a thread when a grammar is compiled, or a matcher that was late is not.

        `patience`: the seconds for which the engine waits for what comes behind one token.
        """
        self._vocab_size = vocab_size
        self._vocabulary = Future[LLTokenizer]()
        begin = partial(_make_vocabulary_in, self._vocabulary, spelling, vocab_size, folder)
        Thread(target=begin, name="vocabulary", daemon=True).start()
        self._compiling = GrammarThreads(MOST_COMPILING, 1, on_done)
        self._following = GrammarThreads(MOST_FOLLOWING, MOST_FOLLOWING_BY_OWNER, on_done, patience)
        self._kept: OrderedDict[bytes, tuple[GrammarJob[Outcome], int]] = OrderedDict()
        """What is compiled or being compiled, by digest, the one used last at the end; with its bytes."""
        self._kept_bytes = 0

    def compile(self, grammar: Grammar, owner: str = "") -> GrammarJob[Outcome]:
        """The compiled grammar, which may be there already; otherwise it is the owner's work."""
        digest = _digest(grammar)
        if (known := self._kept.get(digest)) is not None:
            self._kept.move_to_end(digest)
            return known[0]
        compiled = self._compiling.submit(owner, partial(_compile, self._vocabulary, grammar))
        compiled.rings = True
        size = _BYTES_EACH + _BYTES_PER_CHARACTER * len(grammar.text)
        self._kept[digest] = compiled, size
        self._kept_bytes += size
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._kept_bytes -= dropped
        return compiled

    def refuses(self, owner: str) -> bool:
        """Whether grammars of this owner that took too long still keep threads."""
        return self._compiling.refuses(owner) or self._following.refuses(owner)

    def abandon(self, grammar: Grammar, job: GrammarJob[Outcome]) -> None:
        """Do not compile a grammar for which nobody waits any more."""
        self._compiling.abandon(job)
        digest = _digest(grammar)
        if (known := self._kept.get(digest)) is not None and known[0] is job:
            self._kept_bytes -= self._kept.pop(digest)[1]

    def matcher(self, compiled: Outcome, grammar: Grammar, owner: str = "") -> GrammarMatcher:
        """A matcher at the beginning of a compiled grammar. Raises GrammarError if it is none."""
        if isinstance(compiled, GrammarError):
            raise GrammarError(*compiled.args)  # a new one: those that are kept would gather tracebacks
        return GrammarMatcher(compiled, grammar, self._vocab_size, self._following, owner)

    def stop(self) -> None:
        """Compile nothing more. Answers that have begun are followed on."""
        self._compiling.stop()


def took_too_long() -> GrammarError:
    return GrammarError(
        f"the grammar of the answer takes more than {COMPILE_SECONDS:g} seconds to compile: make it simpler"
    )


def _digest(grammar: Grammar) -> bytes:
    return hashlib.sha256(f"{grammar.kind} {grammar.text}".encode("utf-8", "surrogatepass")).digest()


def _compile(
    vocabulary: Future[LLTokenizer], grammar: Grammar, job: GrammarJob[Outcome], executor: LLExecutor
) -> Outcome:
    tokenizer = vocabulary.result()
    job.started = time.monotonic()  # the vocabulary is nobody's work
    text = llguidance_grammar(grammar.kind, grammar.text)
    compiled = LLMatcher(tokenizer, text, limits=llguidance_matcher.LIMITS, log_level=0)
    # Most of the lexer's work is done for the first bound, and shared by all copies.
    first, bits, began = compiled.deep_copy(), b"", time.monotonic()
    if not first.is_error():
        bits = first.compute_bitmask()
    seconds = time.monotonic() - began
    if first.is_error():
        return GrammarError(f"the grammar of the answer cannot be used: {_in_short(first.get_error())}")
    ends = sum(1 << end for end in set(tokenizer.eos_tokens))
    size = 4 * -(-tokenizer.vocab_size // 32)
    return Compiled(compiled, bits, seconds, size, ends, LLMatcher(tokenizer, "start: nothing", log_level=0))


def _in_short(error: str) -> str:
    """The first line of an error without the remark that it could be longer; a bare name says nothing."""
    line = error.replace("<non-verbose/>", "").strip().partition("\n")[0].strip()
    return line[:_LONGEST_ERROR] if " " in line else "it allows no text"


def _make_vocabulary_in(made: Future[LLTokenizer], spelling: Spelling, size: int, folder: str) -> None:
    try:
        made.set_result(_make_vocabulary(spelling, size, folder))
    except BaseException as error:
        made.set_exception(error)


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
    """A tokenizer as llguidance calls it: gives its tokens, and encodes a text.

    Where a grammar leaves no choice of bytes, llguidance lets through only the tokens that the model's own
    tokenizer makes of them. These must spell the text and nothing else, or the grammar allows nothing.
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

    def __call__(self, s: str) -> list[int]:
        data = s.encode()
        if self._tokenizer is not None:
            for before in ("", "\n"):  # many tokenizers of SentencePiece begin a text with a space
                ids = self._ids(before + s)[len(self._ids(before)) :]
                if b"".join(self.tokens[id] for id in ids if id < len(self.tokens)) == data:
                    return ids
        return self._longest_first(data)

    def _ids(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    @cached_property
    def _own(self) -> dict[bytes, int]:
        """The tokens that are text, by their bytes."""
        hidden = set(self.special_token_ids)
        return {data: id for id, data in enumerate(self.tokens) if data and id not in hidden}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._own), default=0)

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
