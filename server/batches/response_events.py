"""The events of background responses that are streamed: rows of the database, of which there are ever more.

Any API process tells them to whoever asks, from any number on. After a kill a response is computed anew: its
events go on with higher numbers, and begin again with `response.in_progress`, whose response has no output.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from server.batches.database import Database
from server.errors import NotFound

LOOK_SECONDS = 0.05
"""Seconds between two looks of a reader for more."""
_MOST_READ = 1000
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
"""The types of events that are the last ones."""

Fields = Mapping[str, object]


def append(writer: Any, response: int, events: Sequence[Fields]) -> None:
    """Write events in a transaction, each with the number that comes next."""
    [count] = writer.execute(
        "SELECT coalesce(max(number) + 1, 0) FROM events WHERE response = ?", (response,)
    ).fetchone()
    writer.executemany(
        "INSERT INTO events VALUES (?, ?, ?, ?)",
        [
            (response, number, event["type"], msgspec.json.encode({**event, "sequence_number": number}))
            for number, event in enumerate(events, count)
        ],
    )


class EventReader:
    """Reads the events of an answer that comes in parts, and writes them as events of the response."""

    def __init__(self, write: Callable[[Sequence[Fields]], object], same: Fields) -> None:
        """`write` blocks. `same` are the response's fields that are as they were when it was asked for."""
        self.answer: msgspec.Raw | None = None
        """The response, once it has ended."""
        self.left: list[Fields] = []
        """Events that are to be written."""
        self.stopped = asyncio.Event()
        self._write, self._same = write, same
        self._rest = b""

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
            if kind in ENDS:
                self.answer = event["response"]
        self.left.append({**event, "type": kind})

    async def write(self) -> None:
        """Writes what has come, but for the end, until `stopped` is set."""
        while not self.stopped.is_set():
            if self.answer is None and self.left:
                waiting, self.left = self.left, []
                await asyncio.to_thread(self._write, waiting)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self.stopped.wait()


async def follow(database: Database, response: int, after: int) -> AsyncGenerator[tuple[bytes, bool]]:
    """The events behind number `after`, as they come; and whether each is the last one."""
    while True:
        for number, kind, event in await asyncio.to_thread(_read, database, response, after):
            after = number
            yield b"event: %s\ndata: %s\n\n" % (kind.encode(), event), kind in ENDS
            if kind in ENDS:
                return
        await asyncio.sleep(LOOK_SECONDS)


def _read(database: Database, response: int, after: int) -> list[tuple[int, str, bytes]]:
    rows = database.read(
        "SELECT number, kind, event FROM events WHERE response = ? AND number > ? ORDER BY number LIMIT ?",
        *(response, after, _MOST_READ),
    )
    if not rows and not database.read("SELECT 1 FROM responses WHERE number = ?", response):
        raise NotFound("The response was deleted.", "response_id")
    return [(row["number"], row["kind"], row["event"]) for row in rows]
