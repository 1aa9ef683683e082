"""Responses that are kept for a while: those that later ones continue, and those that are computed later."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from server.batches.bodies import Page, page_of
from server.batches.conversations import Conversations, as_shown
from server.batches.folder import KEPT_SECONDS, Folder, PageRequest
from server.batches.response_events import ENDS, Fields, append
from server.errors import ApiError, BadRequest, NotFound, TooManyRequests
from server.schemas.repaired_history import plain_json

MOST_RESPONSES = 10_000
"""Responses that an owner may have: beyond them the oldest one that has ended gives way."""
BACKGROUND_SECONDS = 86_400
"""Seconds for which the answer of a background response is kept at least."""

_KEPT_NOWHERE = (
    "this server keeps no responses: send the items again. The operator can have it keep some by "
    "--response-store."
)

UNFINISHED = ("queued", "in_progress")
_ANSWERED = ("completed", "incomplete")

_log = logging.getLogger(__name__)


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
    conversation: _Named | None = None


class _Named(msgspec.Struct):
    id: str


class Turn(NamedTuple):
    """What a request adds to a conversation of its owner."""

    owner: str
    conversation: str
    asked: bytes
    """The body of the request as it came."""
    answer: KeptAnswer

    @property
    def items(self) -> list[Any]:
        """The items of the body's input, and of its answer."""
        return [json.loads(bytes(item)) for item in [*items_of(self.asked), *self.answer.output]]


class _Item(msgspec.Struct):
    id: Any = None


class _Asked(msgspec.Struct):
    """The part of a body that is looked at before its endpoint reads it."""

    input: str | list[msgspec.Raw] = ""
    previous_response_id: str | None = None
    conversation: str | _Named | None = None


_encode = msgspec.json.encode

T = TypeVar("T")


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
            why = " here." if self.seconds is not None else f": {_KEPT_NOWHERE}"
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
        """Write the answer of a response that was computed, and its last events, if it still waits.

        The same transaction adds it to its conversation, so that it is there once, whenever the process ends.
        """
        now, told = time.time(), msgspec.json.decode(answer, type=KeptAnswer)
        conversation = told.conversation if told.status in _ANSWERED else None
        full = self.folder.full() if conversation is not None and not self.folder.has_room() else None
        turn = conversation and Turn(found.owner, conversation.id, found.request, told)
        items = turn.items if turn else []
        with self._database.write() as writer:
            waits = "SELECT 1 FROM responses WHERE number = ? AND waits"
            if not writer.execute(waits, (found.number,)).fetchone():
                return
            if conversation is not None:
                try:
                    if full is not None:
                        raise full
                    self.conversations.add_in(writer, found.owner, conversation.id, items)
                except ApiError as error:
                    _log.warning("%s is not added to its conversation: %s", found.id, error)
                    answer = changed(answer, conversation=None)
                    told_last = {"response": answer}
                    events = [{**each, **told_last} if each["type"] in ENDS else each for each in events]
            writer.execute(
                "UPDATE responses SET waits = 0, request = '', answer = ?, at = ?, expires_at = ? "
                "WHERE number = ?",
                # Its owner's oldest gives way: it is the newest from now on.
                (answer, now, now + max(BACKGROUND_SECONDS, self.seconds or 0.0), found.number),
            )
            if found.streams:
                append(writer, found.number, events)

    def request_of(self, found: KeptResponse) -> bytes:
        """The body of the request that computes a response, with the items that its conversation has now."""
        body = _read(found.request, dict[str, msgspec.Raw])
        for name in ("background", "store", "previous_response_id"):
            body.pop(name, None)
        if "conversation" in body:
            body = msgspec.json.decode(self._expand(found.owner, _encode(body)), type=dict[str, msgspec.Raw])
            del body["conversation"]
        return _encode({**body, "store": False, "stream": bool(found.streams)})

    def input_page(self, owner: str, id: str, asked: PageRequest) -> Page[dict[str, Any]]:
        """The part of a response's input items that is asked for; no others are decoded."""
        items: dict[str, msgspec.Raw] = {}
        for number, item in enumerate(self.find(owner, id).items):
            own = msgspec.json.decode(item, type=_Item).id
            each = own if isinstance(own, str) and own else f"item_{number}"
            while each in items:  # a client may send again what came before
                each += "_"
            items[each] = item
        ids = list(items)
        if asked.newest_first:
            ids.reverse()
        if asked.after is not None:
            ids = ids[ids.index(asked.after) + 1 :] if asked.after in items else []
        found = [{**json.loads(bytes(items[each])), "id": each} for each in ids[: asked.limit]]
        return page_of([(each["id"], as_shown(each)) for each in found], len(ids) > asked.limit)

    def add_turn(self, turn: Turn) -> None:
        """Adds a turn to its conversation. Errors: see there."""
        self.conversations.add(turn.owner, turn.conversation, turn.items)

    # Those that are continued.

    async def expand(self, owner: str, raw: bytes | bytearray) -> bytes | bytearray:
        """The body with the items of the response, or of the conversation, that it continues, if it does."""
        if b'"previous_response_id"' not in raw and b'"conversation"' not in raw:
            return raw
        return await asyncio.to_thread(self._expand, owner, raw)

    def _expand(self, owner: str, raw: bytes | bytearray) -> bytes | bytearray:
        try:
            asked, whole = _read(raw, _Asked), _read(raw, dict[str, msgspec.Raw])
        except (ValueError, RecursionError):
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
            message = f"`previous_response_id` cannot be continued, because {_KEPT_NOWHERE}"
            raise BadRequest(message, "previous_response_id") from None


def _kept(row: Any) -> KeptResponse:
    values = dict(row)
    return KeptResponse(**{**values, "answer": msgspec.Raw(values["answer"])})


def items_of(asked: bytes) -> list[msgspec.Raw]:
    """The input of a body as items."""
    return _items(_read(asked, _Asked).input)


def _read(body: bytes | bytearray, kind: type[T]) -> T:
    """A body, or the part of it that is asked for. Raises DecodeError."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        try:
            plain = plain_json(body)
        except (ValueError, RecursionError):
            raise msgspec.DecodeError(str(error)) from None
        return msgspec.json.decode(plain, type=kind)


def _items(input: str | Sequence[msgspec.Raw]) -> list[msgspec.Raw]:
    if isinstance(input, str):
        return [msgspec.Raw(_encode({"type": "message", "role": "user", "content": input}))] if input else []
    return [msgspec.Raw(bytes(item)) for item in input]


def changed(answer: msgspec.Raw, **fields: object) -> msgspec.Raw:
    """An answer with other values in some fields."""
    whole = msgspec.json.decode(answer, type=dict[str, msgspec.Raw])
    return msgspec.Raw(_encode({**whole, **fields}))
