"""Reads answers to a load, whole or streamed.

Tokens are counted by the server's own `usage`, never by chunks: one may hold several tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether the chunk was sent because of new tokens, even if they show no text yet.

        The first chunk of a chat names the role only, and the last one may give the reason of its end only.
        """
        delta = self.delta
        if delta is None or delta.says:
            return True
        return delta.content == "" and delta.role is None and self.finish_reason is None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    @property
    def says(self) -> bool:
        return bool(self.content or self.reasoning or self.reasoning_content or self.tool_calls)


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _Message(msgspec.Struct):
    """A chunk, or a whole answer."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: _Error | str | None = None


_decode = msgspec.json.Decoder(_Message).decode


class WholeAnswer:
    """An answer that comes as one JSON body."""

    def __init__(self) -> None:
        self._body = bytearray()
        self.times: list[float] = []
        """When chunks with new tokens came; empty for an answer in one piece."""
        self.usage: Usage | None = None

    def receive(self, data: bytes) -> None:
        self._body += data

    def finish(self, status: int) -> tuple[str | None, str]:
        """The kind of error, if it is one, and what the server said."""
        try:
            message = _decode(self._body)
        except msgspec.DecodeError:
            message = _Message(error=self._body[:200].decode(errors="replace"))
        if status != 200:
            return f"HTTP {status}", _text_of(message.error)
        if message.error is not None:
            return "not an answer", _text_of(message.error)
        self.usage = message.usage
        return (None, "") if message.usage is not None else ("the answer had no usage", "")


class StreamedAnswer(WholeAnswer):
    """An answer that comes as server-sent events. The clock is read when bytes arrive, before parsing."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._unread = b""
        self._clock = clock
        self._done = False
        self._error = ""

    def receive(self, data: bytes) -> None:
        now = self._clock()
        # An event may lie over several packets, and a packet hold several events.
        *events, self._unread = (self._unread + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    self._take(line[5:].strip(), now)

    def finish(self, status: int) -> tuple[str | None, str]:
        if status != 200:
            self._body += self._unread
            return super().finish(status)
        if self._error:
            return "error in the stream", self._error
        if not self._done:
            return "the stream broke off", ""
        return (None, "") if self.usage is not None else ("the stream had no usage", "")

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            message = _decode(data)
        except msgspec.DecodeError as error:
            self._error = f"not a chunk: {error}"
            return
        if message.error is not None:
            self._error = _text_of(message.error)
        if message.usage is not None:
            self.usage = message.usage
        if any(choice.has_tokens for choice in message.choices):
            self.times.append(now)


def _text_of(error: _Error | str | None) -> str:
    return error.message if isinstance(error, _Error) else error or ""
