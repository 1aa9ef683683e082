"""Vocabularies for tests of grammars, matchers over them, and walks through grammars by chance."""

import random
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np

from engine_core.grammar.compiler import GrammarCompiler
from engine_core.grammar.llguidance_matcher import GrammarMatcher
from engine_core.grammar.matcher import GrammarError, TokenMatcher
from engine_core.protocol import Grammar, Spelling
from server.text.tokenizer import Tokenizer
from server.text.tokenizer_files import TokenizerFiles
from worker.protocol import Bound

DEMO = Path(__file__).parents[2] / "models" / "demo"


@cache
def demo_tokenizer() -> Tokenizer:
    return TokenizerFiles(str(DEMO), "").load()


@cache
def demo_spelling() -> Spelling:
    tokenizer = demo_tokenizer()
    return Spelling(
        tokens=[tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)],
        special=sorted(tokenizer.special_ids),
        ends=[tokenizer.eos_id or 0],
        tokenizer=str(DEMO / "tokenizer.json"),
    )


def byte_spelling(*more: bytes, special: int = 0, ends: tuple[int, ...] = ()) -> Spelling:
    """A token for each byte, and these, of which the last `special` are no text. There is no tokenizer."""
    tokens = [*(bytes([byte]) for byte in range(256)), *more]
    return Spelling(tokens, list(range(len(tokens) - special, len(tokens))), list(ends), "")


def matcher_of(grammar: Grammar, spelling: Spelling, size: int) -> GrammarMatcher:
    compiler = GrammarCompiler(spelling, size, "", lambda: None, patience=60)
    try:
        job = compiler.compile(grammar)
        job.wait()
        return compiler.matcher(job.outcome(), grammar)
    finally:
        compiler.stop()


def follows(matcher: TokenMatcher, tokens: Iterable[int], end: int) -> bool:
    """Whether these tokens, and the one that ends answers where that is needed, are a whole text."""
    try:
        for token in tokens:
            if matcher.complete:
                return False
            matcher.take(token)
        if not matcher.complete:
            matcher.take(end)
    except GrammarError:
        return False
    return True


def allowed_by(bound: Bound | None, size: int) -> list[int]:
    """The tokens that may be sampled, in order."""
    if bound is None:
        return list(range(size))
    if bound.form == "bits":
        bits = np.unpackbits(np.frombuffer(bound.data, np.uint8), bitorder="little")
        assert not bits[size:].any(), "bits beyond the vocabulary"
        return np.flatnonzero(bits).tolist()
    ids = np.frombuffer(bound.data, "<i4").tolist()
    if bound.form == "allowed":
        return ids
    return sorted(set(range(size)) - set(ids))


def walk(matcher: TokenMatcher, size: int, rng: random.Random, most: int) -> list[int]:
    """Tokens drawn by chance among those that a matcher allows, until it is complete or there are `most`."""
    tokens: list[int] = []
    while not matcher.complete and len(tokens) < most:
        tokens.append(rng.choice(allowed_by(matcher.bound(), size)))
        matcher.take(tokens[-1])
    return tokens
