"""Vocabularies for tests of grammars, and walks through grammars by chance."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import numpy as np

from engine_core.grammar.matcher import TokenMatcher
from engine_core.protocol import Spelling
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
