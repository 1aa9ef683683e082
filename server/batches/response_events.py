"""The events of background responses that are streamed: a file for each, which grows while it is computed.

Any API process tells them to whoever asks, from any number on. After a kill a response is computed anew: its
events go on with higher numbers, and begin again with `response.in_progress`, whose response has no output.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path

import msgspec

from server.errors import NotFound

LOOK_SECONDS = 0.05
"""Seconds between two looks of a reader for more."""
_MOST_READ = 1 << 20
_ENDS = ("response.completed", "response.incomplete", "response.failed", "error")

Fields = Mapping[str, object]


class _Kind(msgspec.Struct):
    type: str
    response: msgspec.Raw = msgspec.Raw(b"null")


class EventFile:
    """The writer's side. All functions block."""

    def __init__(self, path: Path) -> None:
        """What a killed process has not written to its end is cut off."""
        self._path = path
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(path, len(whole))
        lines = whole.splitlines()
        self._count = len(lines)
        last = msgspec.json.decode(lines[-1], type=_Kind) if lines else None
        self.end = None if last is None or last.type not in _ENDS else last.response
        """The response as the last event told it, if that was the last one of all."""

    def append(self, events: Sequence[Fields]) -> None:
        """Write events, each with its number."""
        lines = b""
        for event in events:
            lines += msgspec.json.encode({**event, "sequence_number": self._count}) + b"\n"
            self._count += 1
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with open(descriptor, "ab") as file:
            file.write(lines)


class EventReader:
    """Reads the events of an answer that comes in parts, and writes them as events of the response."""

    def __init__(self, file: EventFile, same: Fields) -> None:
        """`same` are the fields of the response that are as they were when it was asked for."""
        self.answer: msgspec.Raw | None = None
        """The response, once it has ended."""
        self._file, self._same = file, same
        self._rest = b""
        self._waiting: list[Fields] = []

    def push(self, data: bytes) -> None:
        """Take a part of the answer."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            if line.startswith(b"data: {"):
                self._take(msgspec.json.decode(line[6:], type=dict[str, msgspec.Raw]))

    def _take(self, event: dict[str, msgspec.Raw]) -> None:
        kind = msgspec.json.decode(event.get("type", b'""'), type=str)
        if not kind or kind == "response.created":  # it was told when it was asked for
            return
        if "response" in event:
            told = {**msgspec.json.decode(event["response"], type=dict[str, msgspec.Raw]), **self._same}
            event["response"] = msgspec.Raw(msgspec.json.encode(told))
            if kind in _ENDS:
                self.answer = event["response"]
        self._waiting.append(event)

    async def write(self) -> None:
        """Writes what has come until it is cancelled."""
        while True:
            await self.flush()
            await asyncio.sleep(LOOK_SECONDS)

    async def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            await asyncio.to_thread(self._file.append, waiting)


async def follow(path: Path, after: int) -> AsyncGenerator[tuple[bytes, bool]]:
    """The events behind number `after`, as they come; and whether each is the last one."""
    place = number = 0
    while True:
        data = await asyncio.to_thread(_read, path, place)
        whole = data[: data.rfind(b"\n") + 1]
        place += len(whole)
        for line in whole.splitlines():
            kind = msgspec.json.decode(line, type=_Kind).type
            if number > after:
                yield b"event: %s\ndata: %s\n\n" % (kind.encode(), line), kind in _ENDS
            if kind in _ENDS:
                return
            number += 1
        if not whole:
            await asyncio.sleep(LOOK_SECONDS)


def _read(path: Path, place: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(place)
            data = file.read(_MOST_READ)
            return data if len(data) < _MOST_READ or b"\n" in data else data + file.readline()
    except FileNotFoundError:
        raise NotFound("The response was deleted.", "response_id") from None
