"""One batch from its input to its results: its lines are checked, computed, and written down once each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from server.batches.app_call import OwnerCalls
from server.batches.database import Damaged
from server.batches.folder import Folder, new_id
from server.batches.line_format import BatchLine, LineFault, answered, body_of, read_line, unanswered
from server.batches.line_store import BatchLines, Result, read_input
from server.batches.records import MESSAGES, BatchError, BatchTable, Status, StoredBatch

MOST_LINES = 50_000
MOST_LINE_BYTES = 16 << 20
MOST_ERRORS = 100
"""Errors of an input that are told."""
_LOOK_SECONDS, _FULL_SECONDS = 1.0, 5.0
"""Seconds between two looks whether the folder has room, and has it again."""

_ENDINGS: dict[Status, tuple[str, str]] = {
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    "cancelled": ("batch_cancelled", "This request was not executed, because the batch was cancelled."),
    "failed": ("batch_failed", "This request was not executed, because data of the batch were damaged."),
}
"""The code and the sentence for requests that a batch leaves, by what it becomes."""


class BatchRun:
    """A batch while it is worked on. Only the process that holds the folder's lock has any."""

    def __init__(
        self, folder: Folder, batch: StoredBatch, calls: OwnerCalls, places: asyncio.Semaphore
    ) -> None:
        """`places` bounds the lines of all batches that are under way."""
        self.record, self._state, self.ended = batch.record, batch.state, False
        self.id, self.owner, self.at = batch.record.id, batch.record.owner, batch.record.at
        self._folder, self._calls, self._places = folder, calls, places
        self._table, self._lines = BatchTable(folder), BatchLines(folder, batch.record)
        self._looked = 0.0
        self._early: Status | None = None
        """The status in which it ends without having answered all lines."""
        self._ends_early = asyncio.Event()

    def look(self, *, wanted: bool) -> None:
        """End early if the time is over, or the client has cancelled the batch."""
        if self.record.expires_at <= time.time():
            self._end_early("expired")
        elif not wanted:
            self._end_early("cancelled")

    def _end_early(self, status: Status) -> None:
        """Compute no more lines, and end as one that is cancelled or has expired, once it is in progress."""
        if self._early is None:
            self._early = status
            self._ends_early.set()

    async def run(self) -> None:
        """Works until the batch has ended. Whatever stops it, it can be run again. Raises OSError.

        If data are damaged, it fails, and its lines without a result are errors.
        """
        self._state = (await asyncio.to_thread(self._table.find, self.id, self.owner)).state
        try:
            if self._state.status == "validating":
                await self._validate()
            if self._state.status == "in_progress":
                await self._compute()
        except Damaged as damage:
            self._state.fail(damage.message)
            if self._state.status == "validating":
                self._state.enter("failed")
                await self._write_state()
            else:
                await self._finish(early=True)
        if self._state.status == "finalizing":
            await asyncio.to_thread(self._lines.publish, self._state)
        self.ended = True
        await asyncio.to_thread(self._folder.forget_expired)  # its input, if the client has deleted that

    async def give_up(self, message: str) -> None:
        """End as a failed batch without results, because the database cannot be read."""
        self._state.fail(message)
        self._state.enter("failed")
        await asyncio.to_thread(self._table.give_up, self.id, self._state)

    # Validating.

    async def _validate(self) -> None:
        errors = await asyncio.to_thread(self._check_lines)
        self._state.errors = errors
        self._state.enter("failed" if errors else "in_progress")
        await self._write_state()

    def _check_lines(self) -> list[BatchError]:
        """What is wrong with the input. Sets the batch's model and its number of lines, and notes them."""
        seen, errors, model = set[str](), list[BatchError](), None
        for each in read_input(self._folder, self.record.input_file_id, MOST_LINE_BYTES):
            if len(errors) == MOST_ERRORS or len(seen) > MOST_LINES:
                continue  # whether the file is damaged is known at its end
            try:
                if each.size > MOST_LINE_BYTES:
                    raise LineFault("line_too_long", f"has more than {MOST_LINE_BYTES} bytes")
                line = read_line(each.raw)
                model = line.model if model is None else model
                self._check(line, seen, model)
                self._lines.note(each, line.custom_id)
            except LineFault as fault:
                said = f"Line {each.number} {fault.message}."
                errors.append(BatchError(fault.code, each.number, said, fault.param))
        if len(seen) > MOST_LINES:
            said = f"The input has more than {MOST_LINES} lines: make several batches of it."
            errors.append(BatchError("too_many_tasks", None, said))
        elif not seen and not errors:
            errors.append(BatchError("empty_file", None, "The input has no lines: write a request in each."))
        self._lines.write_noted()
        self._state.total, self._state.model = len(seen), model or None
        return errors

    def _check(self, line: BatchLine, seen: set[str], model: str) -> None:
        """Raises LineFault if a line does not go with the batch, or with those before it."""
        if line.custom_id in seen:
            raise LineFault(
                "duplicate_custom_id",
                f"has the custom_id {line.custom_id[:64]!r} of another line: each must have its own",
                "custom_id",
            )
        seen.add(line.custom_id)
        if line.url != self.record.endpoint:
            raise LineFault(
                "invalid_url",
                f"has the url {line.url[:64]!r}: all lines must have the batch's endpoint, "
                f"{self.record.endpoint}",
                "url",
            )
        if line.model != model and self.record.endpoint != MESSAGES:
            raise LineFault(
                "mismatched_model",
                f"asks for the model {line.model[:64]!r}, and the first line for {model[:64]!r}: a batch has "
                "one model",
                "body.model",
            )

    # Computing.

    async def _compute(self) -> None:
        """Have each line answered that is not, until the batch ends early; then note the others' errors."""
        if self._state.ends_as != "completed":  # it was killed when it ended early
            self._early = self._state.ends_as
            self._ends_early.set()
        work = asyncio.create_task(self._answer_all())
        early = asyncio.create_task(self._ends_early.wait())
        try:
            await asyncio.wait([work, early], return_when=asyncio.FIRST_COMPLETED)
        finally:
            early.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait([work])
        if work.cancelled() and self._early is not None:
            self._state.ends_as = self._early
            await self._finish(early=True)
        else:
            _raise_first(work.exception())
            await self._finish(early=False)

    async def _finish(self, *, early: bool) -> None:
        """Computes no more; lines without a result get an error, if it ends early."""
        if early:
            if self._state.left is None:
                found = await asyncio.to_thread(self._table.find, self.id, self.owner)
                self._state.left = self._state.total - found.completed - found.failed
            await self._write_state()
            await asyncio.to_thread(self._note_left)
        self._state.enter("finalizing")
        await self._write_state()

    async def _answer_all(self) -> None:
        async with aclosing(self._unanswered()) as lines, asyncio.TaskGroup() as group:
            async for number, line in lines:
                await self._places.acquire()
                task = group.create_task(self._answer(number, line))
                task.add_done_callback(lambda _: self._places.release())  # also if it never began

    async def _unanswered(self) -> AsyncGenerator[tuple[int, BatchLine]]:
        after = 0
        while lines := await asyncio.to_thread(self._lines.unanswered, after):
            if time.monotonic() - self._looked > _LOOK_SECONDS:
                await self._wait_for_room()
            for number, line in lines:
                yield number, line
                after = number

    async def _wait_for_room(self) -> None:
        """Waits until the folder has room for results. Nothing is lost meanwhile but time."""
        while not await asyncio.to_thread(self._folder.has_room):
            await asyncio.sleep(_FULL_SECONDS)
        self._looked = time.monotonic()

    async def _answer(self, number: int, line: BatchLine) -> None:
        id = new_id("batch_req_")
        answer = await self._calls.answer(self.record.owner, line.url, bytes(line.body), id)
        output = answered(id, line.custom_id, answer.status, body_of(answer.body))
        await self._lines.keep(Result(number, answer.status != 200, msgspec.json.encode(output), answer.turn))

    def _note_left(self) -> None:
        """Write an error for each line that was not answered before the batch ended."""
        code, sentence = _ENDINGS[self._state.ends_as]
        for names in self._lines.names_left():
            left = [
                (number, unanswered(new_id("batch_req_"), name, code, sentence)) for number, name in names
            ]
            self._lines.add([Result(number, True, msgspec.json.encode(output)) for number, output in left])

    async def _write_state(self) -> None:
        await asyncio.to_thread(self._table.write, self.id, self._state)


def _raise_first(error: BaseException | None) -> None:
    """Raise the first error of a group, if there is one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is not None:
        raise error
