"""One background response: it is computed, and written down with its events."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from server.batches.app_call import Answer, OwnerCalls
from server.batches.database import Damaged
from server.batches.response_events import EventReader, Fields
from server.batches.responses import KeptResponse, KeptResponses, changed
from server.errors import ApiError

PATH = "/v1/responses"
_encode = msgspec.json.encode
_SAME = ("id", "created_at", "background", "store", "previous_response_id", "conversation")


class ResponseRun:
    """A background response while it is computed, in the process that holds the folder's lock."""

    def __init__(
        self,
        number: int,
        owner: str,
        at: float,
        kept: KeptResponses,
        calls: OwnerCalls,
        places: asyncio.Semaphore,
    ) -> None:
        self.id, self.owner, self.at, self.ended = str(number), owner, at, False
        self._number, self._kept, self._calls, self._places = number, kept, calls, places
        self._work: asyncio.Task[tuple[msgspec.Raw, list[Fields]]] | None = None
        self._answer: tuple[msgspec.Raw, list[Fields]] | None = None
        """The answer and its last events once it is computed: writing may have to be tried several times."""

    def look(self, *, wanted: bool) -> None:
        """End early if the client has cancelled or deleted it."""
        if self._work is not None and not wanted:
            self._work.cancel()

    async def run(self) -> None:
        """Computes it, and writes it down. If the process is killed, both are done again; if only writing
        fails, with an OSError, then writing alone."""
        async with self._places:
            found = await asyncio.to_thread(self._kept.waiting, self._number)
            if found is not None and self._answer is None:
                try:
                    self._answer = await self._compute_unless_cancelled(found)
                except msgspec.MsgspecError:
                    raise Damaged("The record of this response in the server's database is damaged") from None
        if found is not None and self._answer is not None:
            await asyncio.to_thread(self._kept.finish, found, *self._answer)
        self.ended = True

    async def give_up(self, message: str) -> None:
        """End it as a failed one, because data of it are damaged."""
        found = await asyncio.to_thread(self._kept.waiting, self._number)
        if found is not None:
            answer = _failed(found, "server_error", message)
            events = [{"type": "response.failed", "response": answer}]
            await asyncio.to_thread(self._kept.finish, found, answer, events)

    async def _compute_unless_cancelled(self, found: KeptResponse) -> tuple[msgspec.Raw, list[Fields]] | None:
        begun = changed(found.answer, status="in_progress")
        await asyncio.to_thread(self._kept.go_on, self._number, [], bytes(begun))
        self._work = asyncio.create_task(self._compute(found))
        try:
            await asyncio.wait([self._work])
        finally:
            self._work.cancel()
        return None if self._work.cancelled() else self._work.result()

    async def _compute(self, found: KeptResponse) -> tuple[msgspec.Raw, list[Fields]]:
        """What clients are told of it from now on, and the events that are not written yet."""
        kept = msgspec.json.decode(found.answer, type=dict[str, msgspec.Raw])
        same = {name: kept[name] for name in _SAME if name in kept}
        try:
            asked = await asyncio.to_thread(self._kept.request_of, found)
        except ApiError as error:  # its conversation is gone
            answer = _failed(found, "invalid_prompt", str(error))
            return answer, [{"type": "response.failed", "response": answer}]
        id = found.id.removeprefix("resp_")
        if found.streams:
            return await self._stream(found, asked, id, same)
        answer = await self._calls.answer(self.owner, PATH, asked, id)
        if answer.status == 200:
            return changed(msgspec.Raw(answer.body), **same), []
        return _error(found, answer), []

    async def _stream(
        self, found: KeptResponse, asked: bytes, id: str, same: Mapping[str, msgspec.Raw]
    ) -> tuple[msgspec.Raw, list[Fields]]:
        events = EventReader(lambda some: self._kept.go_on(self._number, some), same)
        writing = asyncio.create_task(events.write())
        try:
            answer = await self._calls.answer(self.owner, PATH, asked, id, events.push)
        finally:
            events.stopped.set()
            await asyncio.wait([writing])
        writing.result()  # raises the error with which events were lost: they are computed again
        if events.answer is None:
            events.answer = _error(found, answer)
            events.left.append({"type": "response.failed", "response": events.answer})
        return events.answer, events.left


def _error(found: KeptResponse, answer: Answer) -> msgspec.Raw:
    """The response whose request got an error."""
    message = "The request failed."
    with suppress(msgspec.DecodeError, KeyError, TypeError):
        message = msgspec.json.decode(answer.body)["error"]["message"]
    return _failed(found, "invalid_prompt" if answer.status < 500 else "server_error", message)


def _failed(found: KeptResponse, code: str, message: str) -> msgspec.Raw:
    error = {"code": code, "message": message}
    try:
        return changed(found.answer, status="failed", error=error)
    except msgspec.MsgspecError:  # it is damaged, too
        bare = {"id": found.id, "object": "response", "created_at": int(found.at), "background": True}
        return msgspec.Raw(_encode({**bare, "status": "failed", "output": [], "error": error}))
