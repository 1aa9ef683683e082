"""Texts of known lengths for a model that embeds: words of its own vocabulary, each of them one token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

_MARKS = 2
"""Tokens that the tokenizer adds at the ends of a text."""
_TEXTS = 256
"""Tokens in a file, at least; after its end it is read again. No server caches what it has embedded."""


def texts(folder: Path, tokens: int) -> Iterator[str]:
    """Yields texts without end, the same each time."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = sorted(word for word in tokenizer.get_vocab() if word.isalpha() and len(word) > 3)
    dice = random.Random(0)
    while True:
        yield " ".join(dice.choices(words, k=tokens - _MARKS))


def write(file: Path, folder: Path, tokens: int, batch: int) -> None:
    """Requests as `facet bench serve --dataset-name custom` reads them."""
    source = texts(folder, tokens)
    requests = ({"input": [next(source) for _ in range(batch)]} for _ in range(max(8, _TEXTS // batch)))
    file.write_bytes(b"\n".join(map(msgspec.json.encode, requests)))
