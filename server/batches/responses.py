"""Responses that are kept for a while: those that later ones continue, and those that are computed later."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from server.batches.app_call import Answer, OwnerCalls
from server.batches.folder import Folder, not_found, read_record, touch, write_record
from server.batches.response_events import EventFile, EventReader
from server.batches.response_index import MOST_RESPONSES, Entry, ResponseIndex
from server.errors import BadRequest, TooManyRequests

PATH = "/v1/responses"
BACKGROUND_SECONDS = 86_400
"""Seconds for which the answer of a background response is kept at least."""

EVENTS = ".events"
UNFINISHED = ("queued", "in_progress")


class KeptResponse(Entry, kw_only=True):
    """A response: what it was asked, and the answer as it is now."""

    input: list[msgspec.Raw]
    """The items of the whole conversation before the answer."""
    answer: msgspec.Raw
    request: msgspec.Raw = msgspec.Raw(b"null")
    """The body to compute it from, if it waits."""
    streams: bool = False
    """Whether its events are kept, for clients that read them as they come."""

    @property
    def entry(self) -> Entry:
        return Entry(id=self.id, owner=self.owner, at=self.at, waits=self.waits, expires_at=self.expires_at)


class KeptAnswer(msgspec.Struct):
    """The part of an answer that is read again."""

    status: str
    output: list[msgspec.Raw] = []
    background: bool = False


class _Asked(msgspec.Struct):
    """The part of a body that is looked at before its endpoint reads it."""

    input: str | list[msgspec.Raw] = ""
    previous_response_id: str | None = None


_encode = msgspec.json.encode


class KeptResponses:
    """The responses in the folder. All functions block, but for `expand`."""

    def __init__(self, folder: Folder, seconds: float | None) -> None:
        """`seconds` says how long finished responses are kept; None if they are not."""
        self.folder, self.seconds = folder, seconds
        self._index = ResponseIndex(folder.responses)

    def place(self, owner: str, id: str) -> Path:
        """The record of a response. Clients may choose ids, so the name is a digest."""
        digest = hashlib.sha256(f"{owner}\0{id}".encode()).hexdigest()
        return self.folder.responses / f"{digest}.json"

    def find(self, owner: str, id: str) -> KeptResponse:
        """The response of an id. Raises NotFound."""
        found = read_record(self.place(owner, id), KeptResponse)
        if found is None or 0 < found.expires_at <= time.time():
            raise not_found("response", id)
        if found.waits and cancel_mark(self.place(owner, id)).exists():
            found.answer = changed(found.answer, status="cancelled")
        return found

    def has_room(self) -> bool:
        """Whether the folder has room by its last count: a request makes no new one."""
        return self.folder.counted <= self.folder.most_bytes

    def keep(self, owner: str, id: str, asked: bytes, answer: bytes) -> None:
        """Keep a response that has ended. Raises OSError if the disk does not take it."""
        record = KeptResponse(
            id=id,
            owner=owner,
            input=items_of(asked),
            answer=msgspec.Raw(answer),
            expires_at=time.time() + (self.seconds or 0.0),
        )
        self.write(self.place(owner, id), record)

    def write(self, place: Path, record: KeptResponse) -> None:
        """Write a record. If its owner has too many then, the oldest ones are forgotten. Raises OSError."""
        self.folder.counted += write_record(place, record)
        for old in self._index.note(place, record.entry):
            self._forget(old)

    def _forget(self, place: Path) -> None:
        with suppress(FileNotFoundError):
            self.folder.counted -= place.stat().st_size
        forget(place)

    def queue(self, owner: str, id: str, asked: bytes, answer: bytes, *, streams: bool) -> None:
        """Have a response computed later. Raises an error if that cannot be noted."""
        if not self.has_room():
            raise self.folder.full()
        if self._index.waiting(owner) >= MOST_RESPONSES:
            raise TooManyRequests(
                f"{MOST_RESPONSES} background responses wait: cancel some, or ask again when some are done.",
                retry_after=60,
            )
        place = self.place(owner, id)
        record = KeptResponse(
            id=id,
            owner=owner,
            input=items_of(asked),
            answer=msgspec.Raw(answer),
            waits=True,
            request=msgspec.Raw(asked),
            streams=streams,
        )
        try:
            if streams:
                told = ("response.created", "response.queued")
                place.with_suffix(EVENTS).unlink(missing_ok=True)
                EventFile(place.with_suffix(EVENTS)).append(
                    [{"type": each, "response": record.answer} for each in told]
                )
            self.write(place, record)
            touch(queue_mark(place))
        except OSError:  # without its mark it would wait for ever
            self._index.drop(owner, place)
            forget(place)
            raise

    def events_of(self, owner: str, id: str) -> Path:
        """The file of a response's events. Raises an error if it has none."""
        if not self.find(owner, id).streams:
            raise BadRequest(
                f"The response {id[:64]!r} has no events: ask for both `background` and `stream`.",
                "stream",
            )
        return self.place(owner, id).with_suffix(EVENTS)

    def cancel(self, owner: str, id: str) -> KeptResponse:
        found = self.find(owner, id)
        if not msgspec.json.decode(found.answer, type=KeptAnswer).background:
            raise BadRequest(f"The response {id[:64]!r} cannot be cancelled: it was no background one.")
        if found.waits:
            touch(cancel_mark(self.place(owner, id)))
        return self.find(owner, id)

    def delete(self, owner: str, id: str) -> None:
        self.find(owner, id)
        place = self.place(owner, id)
        self._index.drop(owner, place)
        self._forget(place)

    def queued(self) -> list[Path]:
        """The records of responses that are to be computed."""
        return [mark.with_suffix(".json") for mark in self.folder.responses.glob("*.queued")]

    def refresh(self) -> None:
        """Count what other processes have written and deleted, too: the bytes of all, and each owner's
        responses, of which the oldest are forgotten if they are too many."""
        self.folder.used()
        for place in self._index.refresh():
            self._forget(place)

    def clean(self) -> None:
        """Delete those that are kept no longer."""
        for place in self._index.take_expired(time.time()):
            self._forget(place)

    async def expand(self, owner: str, raw: bytes | bytearray) -> bytes | bytearray:
        """The body with the items of the response that it continues, if it does."""
        if b'"previous_response_id"' not in raw:
            return raw
        return await asyncio.to_thread(self._expand, owner, raw)

    def _expand(self, owner: str, raw: bytes | bytearray) -> bytes | bytearray:
        try:
            asked = msgspec.json.decode(raw, type=_Asked)
            whole = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return raw  # the endpoint says what is wrong with it
        if asked.previous_response_id is None:
            return raw
        before = self.find(owner, asked.previous_response_id)
        answer = msgspec.json.decode(before.answer, type=KeptAnswer)
        if answer.status in UNFINISHED:
            raise BadRequest(
                f"The response {before.id[:64]!r} has not ended: it is {answer.status}.",
                "previous_response_id",
            )
        whole["input"] = msgspec.Raw(_encode([*before.input, *answer.output, *_items(asked.input)]))
        return _encode(whole)


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


def queue_mark(place: Path) -> Path:
    return place.with_suffix(".queued")


def cancel_mark(place: Path) -> Path:
    return place.with_suffix(".cancel")


def forget(place: Path) -> None:
    place.unlink(missing_ok=True)
    place.with_suffix(EVENTS).unlink(missing_ok=True)
    forget_marks(place)


def forget_marks(place: Path) -> None:
    """Note that a response is neither to be computed nor to be cancelled any more."""
    queue_mark(place).unlink(missing_ok=True)
    cancel_mark(place).unlink(missing_ok=True)


class ResponseRun:
    """A background response while it is computed, in the process that holds the folder's lock."""

    def __init__(
        self,
        record: KeptResponse,
        place: Path,
        kept: KeptResponses,
        calls: OwnerCalls,
        places: asyncio.Semaphore,
    ) -> None:
        self.id, self.owner, self.at, self.ended = place.stem, record.owner, record.at, False
        self._record, self._place, self._kept, self._calls = record, place, kept, calls
        self._places = places
        self._work: asyncio.Task[msgspec.Raw] | None = None
        self._answer: msgspec.Raw | None = None
        """The answer once it is computed: writing it may have to be tried several times."""

    def look(self) -> None:
        """End early if the client has cancelled or deleted it."""
        if self._work is not None and (cancel_mark(self._place).exists() or not self._place.exists()):
            self._work.cancel()

    async def run(self) -> None:
        """Computes it, and writes it down. If the process is killed, both are done again; if only writing
        fails, with an OSError, then writing alone."""
        if self._answer is None:
            self._answer = await self._end()
        self._record.waits, self._record.request = False, msgspec.Raw(b"null")
        kept_for = max(BACKGROUND_SECONDS, self._kept.seconds or 0.0)
        self._record.at = time.time()  # its owner's oldest gives way: it is the newest from now on
        self._record.expires_at = self._record.at + kept_for
        await asyncio.to_thread(self._write, self._answer)
        self.ended = True

    async def _end(self) -> msgspec.Raw:
        """The answer when the response has ended, which it does early if it is cancelled."""
        async with self._places:
            await asyncio.to_thread(self._write, changed(self._record.answer, status="in_progress"))
            self._work = asyncio.create_task(self._compute())
            try:
                await asyncio.wait([self._work])
            finally:
                self._work.cancel()
        if not (self._work.cancelled() or cancel_mark(self._place).exists()):
            return self._work.result()
        await self._end_events(  # clients were told that it is cancelled
            {"type": "error", "code": "cancelled", "message": "The response was cancelled."}
        )
        return changed(self._record.answer, status="cancelled")

    async def _compute(self) -> msgspec.Raw:
        """What clients are told of it from now on."""
        body = msgspec.json.decode(self._record.request, type=dict[str, msgspec.Raw])
        for name in ("background", "store", "previous_response_id", "stream"):
            body.pop(name, None)
        kept = msgspec.json.decode(self._record.answer, type=dict[str, msgspec.Raw])
        same = {
            name: kept[name] for name in ("id", "created_at", "background", "store", "previous_response_id")
        }
        asked, id = _encode({**body, "store": False}), self._record.id.removeprefix("resp_")
        if self._record.streams:
            return await self._stream(_encode({**body, "store": False, "stream": True}), id, same)
        answer = await self._calls.answer(self.owner, PATH, asked, id)
        return changed(msgspec.Raw(answer.body), **same) if answer.status == 200 else self._failed(answer)

    async def _stream(self, asked: bytes, id: str, same: Mapping[str, msgspec.Raw]) -> msgspec.Raw:
        file = await asyncio.to_thread(EventFile, self._place.with_suffix(EVENTS))
        if file.end is not None:
            return file.end  # the process was killed before it wrote the record
        events = EventReader(file, same)
        writing = asyncio.create_task(events.write())
        try:
            answer = await self._calls.answer(self.owner, PATH, asked, id, events.push)
        finally:
            writing.cancel()
            await asyncio.wait([writing])
        if not writing.cancelled():
            writing.result()  # raises the error with which events were lost: they are computed again
        await events.flush()
        if events.answer is None:
            events.answer = self._failed(answer)
            await self._end_events({"type": "response.failed", "response": events.answer})
        return events.answer

    async def _end_events(self, event: Mapping[str, object]) -> None:
        """Write the last event, if clients read them."""
        if self._record.streams and self._place.exists():
            path = self._place.with_suffix(EVENTS)
            await asyncio.to_thread(lambda: EventFile(path).append([event]))

    def _failed(self, answer: Answer) -> msgspec.Raw:
        message = "The request failed."
        with suppress(msgspec.DecodeError, KeyError, TypeError):
            message = msgspec.json.decode(answer.body)["error"]["message"]
        code = "invalid_prompt" if answer.status < 500 else "server_error"
        return changed(self._record.answer, status="failed", error={"code": code, "message": message})

    def _write(self, answer: msgspec.Raw) -> None:
        """Write the record, unless the client has deleted it meanwhile."""
        self._record.answer = answer
        if self._place.exists():
            self._kept.write(self._place, self._record)
        if not self._record.waits:
            forget_marks(self._place)
