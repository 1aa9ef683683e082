"""The requests of a load: their texts, and how they are written for each endpoint.

Texts are random token ids in exact numbers, or the lines of a file; the same seed always gives the same.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from pathlib import Path

import msgspec

from server.bench.answers import StreamedAnswer, Usage, WholeAnswer
from server.bench.http_client import JSON, Client, TransportError
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
    if options.dataset_path is not None:
        return cycle(_file(options, Path(options.dataset_path)))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request's outcome. Times are in seconds, on one clock."""

    due: float
    """When the request should have gone out; in a closed loop, when it did."""
    ended: float
    inputs: int = 1
    """Texts in the request."""
    input_tokens: int = 0
    output_tokens: int = 0
    times: list[float] = field(default_factory=list[float])
    """When chunks with new tokens came; empty for an answer in one piece."""
    error: str | None = None
    """The kind of error, or None."""
    detail: str = ""
    """The server's message about the error."""

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return self.times[0] - self.due if self.times else None

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first, on average."""
        if not self.times or self.output_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between one chunk and the next."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    @property
    def e2el(self) -> float:
        """Seconds to the end of the answer."""
        return self.ended - self.due


PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "embeddings": "/v1/embeddings",
}

_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")
"""Words for chat, which takes no token ids; each is one token in most vocabularies."""

_encode = msgspec.json.Encoder().encode


def request_body(request: LoadRequest, model: str, options: LoadOptions) -> bytes:
    fields: dict[str, object] = {"model": model}
    if options.kind == "embeddings":
        fields |= {"input": request.texts, "encoding_format": "base64"}
        return _encode(fields | options.extra_body)
    if options.kind == "chat":
        content = _spelled(request.texts[0]) if request.texts else ""
        fields["messages"] = request.messages or [{"role": "user", "content": content}]
    else:
        fields["prompt"] = request.texts[0]
    fields |= {"max_tokens": request.max_tokens, "stream": True, "stream_options": {"include_usage": True}}
    if options.ignore_eos:
        fields["ignore_eos"] = True
    if options.temperature is not None:
        fields["temperature"] = options.temperature
    return _encode(fields | options.extra_body)


def _spelled(text: Text) -> str:
    return text if isinstance(text, str) else " ".join(_WORDS[id % len(_WORDS)] for id in text)


class Sender:
    """Sends one request after the other to one endpoint."""

    def __init__(self, client: Client, model: str, options: LoadOptions) -> None:
        self._client = client
        self._model = model
        self._options = options
        self._path, self._about = PATHS[options.kind], JSON
        self._streams = options.kind != "embeddings"

    def write(self, request: LoadRequest) -> bytes:
        return request_body(request, self._model, self._options)

    async def send(
        self, message: bytes, inputs: int, due: float, answer: WholeAnswer | None = None
    ) -> Outcome:
        """`due` is when it should have gone out: its time runs from there.

        Callers that look at an answer while it arrives bring it along.
        """
        answer = answer or (StreamedAnswer() if self._streams else WholeAnswer())
        try:
            status = await self._client.post(self._path, message, answer.receive, self._about)
            error, detail = answer.finish(status)
        except TransportError as failure:
            error, detail = str(failure), ""
        usage = answer.usage or Usage()
        return Outcome(
            due=due,
            ended=time.perf_counter(),
            inputs=inputs,
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens or 0,
            times=answer.times,
            error=error,
            detail=detail,
        )
