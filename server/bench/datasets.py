"""The texts that a load consists of: random token ids in exact numbers, or the lines of a file.

The same seed always gives the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import msgspec

from server.bench.serve_options import BenchError, LoadOptions

Text = str | list[int]
Message = dict[str, object]

_FIRST_ID = 100
"""Ids below this one are special tokens in most vocabularies."""
_FILE_OUTPUT_LEN = 128


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request, whatever endpoint it will go to."""

    texts: list[Text]
    """Only requests for embeddings have several."""
    max_tokens: int = 0
    messages: list[Message] | None = None


def endless_requests(options: LoadOptions, salt: int = 0) -> Iterator[LoadRequest]:
    """Yields requests without end; requests of different `salt` have no text in common."""
    match options.dataset_name:
        case "prefix_repetition":
            return _prefixes(options, salt)
        case "custom":
            return cycle(_file(options, Path(str(options.dataset_path))))
        case _:
            return _random(options, salt)


class _Dice:
    def __init__(self, options: LoadOptions, salt: int) -> None:
        self._random = random.Random(f"{options.seed} {salt}")
        self._ids = range(_FIRST_ID, options.random_vocab_size)
        self._ratio = options.random_range_ratio

    def ids(self, count: int) -> list[int]:
        return self._random.choices(self._ids, k=count)

    def length(self, mean: int) -> int:
        spread = int(mean * self._ratio)
        return max(1, self._random.randint(mean - spread, mean + spread))


def _random(options: LoadOptions, salt: int) -> Iterator[LoadRequest]:
    dice = _Dice(options, salt)
    prefix = dice.ids(options.random_prefix_len)
    count = options.random_batch_size if options.kind == "embeddings" else 1
    while True:
        texts: list[Text] = [prefix + dice.ids(dice.length(options.random_input_len)) for _ in range(count)]
        yield LoadRequest(texts, dice.length(options.random_output_len))


def _prefixes(options: LoadOptions, salt: int) -> Iterator[LoadRequest]:
    dice = _Dice(options, salt)
    prefixes = [
        dice.ids(options.prefix_repetition_prefix_len) for _ in range(options.prefix_repetition_num_prefixes)
    ]
    for prefix in cycle(prefixes):
        ids = prefix + dice.ids(options.prefix_repetition_suffix_len)
        yield LoadRequest([ids], options.prefix_repetition_output_len)


class _Line(msgspec.Struct):
    prompt: str | list[int] | None = None
    input: str | list[str | int | list[int]] | None = None
    messages: list[Message] | None = None
    max_tokens: int | None = None


def _file(options: LoadOptions, path: Path) -> list[LoadRequest]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BenchError(f"--dataset-path {path} cannot be read: {error.strerror}") from error
    works = [_of_line(options, path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not works:
        raise BenchError(f"{path} holds no requests; each line must be a JSON object")
    return works


def _of_line(options: LoadOptions, path: Path, number: int, line: bytes) -> LoadRequest:
    try:
        asked = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError as error:
        raise BenchError(f"{path}, line {number}: {error}") from error
    texts = _texts(asked)
    if not texts and (asked.messages is None or options.kind != "chat"):
        raise BenchError(
            f"{path}, line {number}: {options.kind} needs "
            + ("messages or prompt" if options.kind == "chat" else "prompt or input")
        )
    if options.kind != "embeddings":
        texts = texts[:1]
    length = options.custom_output_len or asked.max_tokens or _FILE_OUTPUT_LEN
    return LoadRequest(texts, length, asked.messages)


def _texts(asked: _Line) -> list[Text]:
    given = asked.prompt if asked.input is None else asked.input
    if not given:
        return []
    if isinstance(given, str):
        return [given]
    ids = [item for item in given if isinstance(item, int)]
    return [ids] if ids else [item for item in given if not isinstance(item, int)]
