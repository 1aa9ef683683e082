"""Responses that are kept for a while: those that later ones continue, and those that are computed later.

The events of a background response that is streamed are rows of the database, of which there are ever more.
Any API process tells them to whoever asks, from any number on. After a kill a response is computed anew: its
events go on with higher numbers, and begin again with `response.in_progress`, whose response has no output.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from server.batches.conversations import Conversations
from server.batches.database import Database
from server.batches.folder import KEPT_SECONDS, Folder
from server.errors import BadRequest, NotFound, TooManyRequests
from server.schemas.conversations.response_input import KEPT_NOWHERE

LOOK_SECONDS = 0.05
"""Seconds between two looks of a reader for more."""
_MOST_READ = 1000
_ENDS = ("response.completed", "response.incomplete", "response.failed", "error")

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
            if kind in _ENDS:
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
            yield b"event: %s\ndata: %s\n\n" % (kind.encode(), event), kind in _ENDS
            if kind in _ENDS:
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


MOST_RESPONSES = 10_000
"""Responses that an owner may have: beyond them the oldest one that has ended gives way."""
BACKGROUND_SECONDS = 86_400
"""Seconds for which the answer of a background response is kept at least."""

UNFINISHED = ("queued", "in_progress")


class KeptResponse(msgspec.Struct):
    """A response: what it was asked, and the answer as it is now."""

    number: int
    """Its number in the database; a response with the same id that comes later has another one."""
    owner: str
    id: str
    at: float
    waits: bool
    """Whether it is still to be computed: then it gives way to no other one."""
    streams: bool
    """Whether its events are kept, for clients that read them as they come."""
    expires_at: float
    input: bytes
    """The items of the whole conversation before the answer: a list."""
    answer: msgspec.Raw
    request: bytes
    """The body to compute it from, if it waits."""

    @property
    def items(self) -> list[msgspec.Raw]:
        return msgspec.json.decode(self.input, type=list[msgspec.Raw])


class KeptAnswer(msgspec.Struct):
    """The part of an answer that is read again."""

    status: str
    output: list[msgspec.Raw] = []
    background: bool = False


class _Named(msgspec.Struct):
    id: str


class _Asked(msgspec.Struct):
    """The part of a body that is looked at before its endpoint reads it."""

    input: str | list[msgspec.Raw] = ""
    previous_response_id: str | None = None
    conversation: str | _Named | None = None


_encode = msgspec.json.encode


class KeptResponses:
    """The responses in the database of a folder. All functions block, but for `expand` and `has_room`."""

    def __init__(self, folder: Folder, seconds: float | None) -> None:
        """`seconds` says how long finished responses are kept; None if they are not."""
        self.folder, self.seconds = folder, seconds
        self.conversations = Conversations(folder)
        self._database = folder.database

    def find(self, owner: str, id: str) -> KeptResponse:
        """The response of an id. Raises NotFound."""
        rows = self._database.read(
            "SELECT * FROM responses WHERE owner = ? AND id = ? AND (waits OR expires_at > ?)",
            *(owner, id, time.time()),
        )
        if not rows:
            why = " here." if self.seconds is not None else f": {KEPT_NOWHERE}"
            raise NotFound(f"There is no response {id[:64]!r}{why}", "response_id")
        return _kept(rows[0])

    def has_room(self) -> bool:
        """Whether the folder has room by its last count: a request makes no new one."""
        return self.folder.counted <= self.folder.most_bytes

    def keep(self, owner: str, id: str, asked: bytes, answer: bytes) -> None:
        """Keep a response that has ended. It is not waited for the disk. Raises OSError if that is full."""
        expires_at, items = time.time() + (self.seconds or 0.0), _encode(items_of(asked))
        with self._database.write(durable=False) as writer:
            self._add(writer, owner, id, items, answer, expires_at=expires_at)

    def _add(
        self,
        writer: Any,
        owner: str,
        id: str,
        items: bytes,
        answer: bytes,
        *,
        expires_at: float = 0.0,
        request: bytes | None = None,
        streams: bool = False,
    ) -> int:
        """Write a response in place of an earlier one of this id, and return its number.

        If its owner has too many then, the oldest of those that have ended are forgotten.
        """
        writer.execute("DELETE FROM responses WHERE owner = ? AND id = ?", (owner, id))
        added = writer.execute(
            "INSERT INTO responses (owner, id, at, waits, streams, expires_at, input, answer, request) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (owner, id, time.time(), request is not None, streams, expires_at, items, answer, request or b""),
        )
        writer.execute(
            "DELETE FROM responses WHERE number IN (SELECT number FROM responses WHERE owner = ? AND "
            "waits = 0 ORDER BY at DESC, number DESC LIMIT -1 OFFSET ?)",
            # What has just ended is kept in any case.
            (owner, max(int(request is None), MOST_RESPONSES - self._waiting(writer, owner))),
        )
        self.folder.counted += len(items) + len(answer) + len(request or b"")
        return added.lastrowid

    def _waiting(self, writer: Any, owner: str) -> int:
        """Counts the responses of an owner that are still to be computed."""
        counted = "SELECT count(*) FROM responses WHERE owner = ? AND waits = 1"
        return writer.execute(counted, (owner,)).fetchone()[0]

    def queue(
        self, owner: str, id: str, asked: bytes, answer: bytes, *, streams: bool, request: bytes | None = None
    ) -> None:
        """Have a response computed later, of the body `asked`, or of `request` if that is given.

        Raises an error if that cannot be noted.
        """
        if not self.has_room():
            raise self.folder.full()
        items = _encode(items_of(asked))
        with self._database.write() as writer:
            if self._waiting(writer, owner) >= MOST_RESPONSES:
                raise TooManyRequests(
                    f"{MOST_RESPONSES} background responses wait: cancel some, or ask again when some are "
                    "done.",
                    retry_after=60,
                )
            number = self._add(writer, owner, id, items, answer, request=request or asked, streams=streams)
            if streams:
                told = ("response.created", "response.queued")
                append(writer, number, [{"type": each, "response": msgspec.Raw(answer)} for each in told])

    def streamed(self, owner: str, id: str) -> int:
        """The number of a response that has events. Raises an error if it has none."""
        found = self.find(owner, id)
        if not found.streams:
            raise BadRequest(
                f"The response {id[:64]!r} has no events: ask for both `background` and `stream`.",
                "stream",
            )
        return found.number

    def cancel(self, owner: str, id: str) -> KeptResponse:
        found = self.find(owner, id)
        if not msgspec.json.decode(found.answer, type=KeptAnswer).background:
            raise BadRequest(f"The response {id[:64]!r} cannot be cancelled: it was no background one.")
        last = {"type": "error", "code": "cancelled", "message": "The response was cancelled."}
        self.finish(found, changed(found.answer, status="cancelled"), [last])
        return self.find(owner, id)

    def delete(self, owner: str, id: str) -> None:
        number = self.find(owner, id).number
        with self._database.write() as writer:
            writer.execute("DELETE FROM responses WHERE number = ?", (number,))

    def clean(self) -> None:
        """Delete those, and conversations, that are kept no longer."""
        now, kept = time.time(), max(KEPT_SECONDS, self.seconds or 0.0)
        self._database.clean("responses", "NOT waits AND expires_at <= ?", now)
        self._database.clean("conversations", "used_at <= ?", now - kept)

    # Those that are computed later.

    def to_do(self) -> list[tuple[int, str, float]]:
        """The numbers of responses that are to be computed, their owners, and when they came."""
        rows = self._database.read("SELECT number, owner, at FROM responses WHERE waits")
        return [(row["number"], row["owner"], row["at"]) for row in rows]

    def waiting(self, number: int) -> KeptResponse | None:
        """A response that is to be computed; None if it was cancelled or deleted."""
        rows = self._database.read("SELECT * FROM responses WHERE number = ? AND waits", number)
        return _kept(rows[0]) if rows else None

    def go_on(self, number: int, events: Sequence[Fields], answer: bytes | None = None) -> None:
        """Write events of a response, or what clients are told of it from now on, if it still waits."""
        with self._database.write(durable=False) as writer:
            still = "UPDATE responses SET answer = coalesce(?, answer) WHERE number = ? AND waits"
            if writer.execute(still, (answer, number)).rowcount:
                append(writer, number, events)

    def finish(self, found: KeptResponse, answer: msgspec.Raw, events: Sequence[Fields]) -> None:
        """Write the answer of a response that was computed, and its last events, if it still waits."""
        now = time.time()
        with self._database.write() as writer:
            ended = writer.execute(
                "UPDATE responses SET waits = 0, request = '', answer = ?, at = ?, expires_at = ? "
                "WHERE number = ? AND waits",
                # Its owner's oldest gives way: it is the newest from now on.
                (answer, now, now + max(BACKGROUND_SECONDS, self.seconds or 0.0), found.number),
            )
            if ended.rowcount and found.streams:
                append(writer, found.number, events)

    # Those that are continued.

    async def expand(self, owner: str, raw: bytes | bytearray) -> bytes | bytearray:
        """The body with the items of the response, or of the conversation, that it continues, if it does."""
        if b'"previous_response_id"' not in raw and b'"conversation"' not in raw:
            return raw
        return await asyncio.to_thread(self._expand, owner, raw)

    def _expand(self, owner: str, raw: bytes | bytearray) -> bytes | bytearray:
        try:
            asked = msgspec.json.decode(raw, type=_Asked)
            whole = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return raw  # the endpoint says what is wrong with it
        if (named := asked.conversation) is not None:
            id = named if isinstance(named, str) else named.id
            before = self.conversations.items(owner, id)
        elif asked.previous_response_id is not None:
            before = self._items_before(owner, asked.previous_response_id)
        else:
            return raw
        whole["input"] = msgspec.Raw(_encode([*before, *_items(asked.input)]))
        return _encode(whole)

    def _items_before(self, owner: str, id: str) -> list[msgspec.Raw]:
        """The items of a response that has ended, and those before it. Raises an error if there is none."""
        before = self._find_earlier(owner, id)
        try:
            answer, items = msgspec.json.decode(before.answer, type=KeptAnswer), before.items
        except msgspec.MsgspecError:
            message = f"The response {before.id[:64]!r} is damaged: send the items again."
            raise BadRequest(message, "previous_response_id") from None
        if answer.status in UNFINISHED:
            raise BadRequest(
                f"The response {before.id[:64]!r} has not ended: it is {answer.status}.",
                "previous_response_id",
            )
        return [*items, *answer.output]

    def _find_earlier(self, owner: str, id: str) -> KeptResponse:
        try:
            return self.find(owner, id)
        except NotFound:
            if self.seconds is not None:
                raise
            message = f"`previous_response_id` cannot be continued, because {KEPT_NOWHERE}"
            raise BadRequest(message, "previous_response_id") from None


def _kept(row: Any) -> KeptResponse:
    values = dict(row)
    return KeptResponse(**{**values, "answer": msgspec.Raw(values["answer"])})


def items_of(asked: bytes) -> list[msgspec.Raw]:
    """The input of a body as items."""
    return _items(msgspec.json.decode(asked, type=_Asked).input)


def _items(input: str | Sequence[msgspec.Raw]) -> list[msgspec.Raw]:
    if isinstance(input, str):
        return [msgspec.Raw(_encode({"type": "message", "role": "user", "content": input}))] if input else []
    return [msgspec.Raw(bytes(item)) for item in input]


def changed(answer: msgspec.Raw, **fields: object) -> msgspec.Raw:
    """An answer with other values in some fields."""
    whole = msgspec.json.decode(answer, type=dict[str, msgspec.Raw])
    return msgspec.Raw(_encode({**whole, **fields}))
