"""One batch from its input to its results: its lines are checked, computed, and written down once each."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress

import msgspec

from server.batches.app_call import OwnerCalls
from server.batches.folder import FileRecord, Folder, new_id, write_record
from server.batches.journal import Journal, LineSlices, Result, rest
from server.batches.lines import BatchLine, LineFault, answered, body_of, read_line, unanswered
from server.batches.records import ENDED, BatchError, BatchFiles, BatchRecord, BatchState, Status, state_of

MOST_LINES = 50_000
MOST_LINE_BYTES = 16 << 20
MOST_ERRORS = 100
"""Errors of an input that are told."""
_TOLD_SECONDS = 0.5
"""Seconds between two notes of how many lines are done."""
_LOOK_SECONDS, _FULL_SECONDS = 1.0, 5.0
"""Seconds between two looks whether the folder has room, and has it again."""

_ENDINGS: dict[Status, tuple[str, str]] = {
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    "cancelled": ("batch_cancelled", "This request was not executed, because the batch was cancelled."),
}
"""The code and the sentence for requests that a batch leaves, by what it becomes."""


class BatchRun:
    """A batch while it is worked on. Only the process that holds the folder's lock has any."""

    def __init__(
        self, folder: Folder, record: BatchRecord, calls: OwnerCalls, places: asyncio.Semaphore
    ) -> None:
        """`places` bounds the lines of all batches that are under way."""
        self.id, self.owner, self.at = record.id, record.owner, record.at
        self.record = record
        self._folder, self._calls, self._places = folder, calls, places
        self._files = BatchFiles(folder, record.id)
        self._state = BatchState()
        self._told = self._looked = 0.0
        self._writing = threading.Lock()
        self._early: Status | None = None
        """The status in which it ends without having answered all lines."""
        self._ends_early = asyncio.Event()

    def look(self) -> None:
        """End early if the time is over, or the client has cancelled the batch."""
        if self.record.expires_at <= time.time():
            self._end_early("expired")
        elif self._files.cancel.exists():
            self._end_early("cancelled")

    def _end_early(self, status: Status) -> None:
        """Compute no more lines, and end as one that is cancelled or has expired, once it is in progress."""
        if self._early is None:
            self._early = status
            self._state.times["cancelling" if status == "cancelled" else status] = int(time.time())
            self._ends_early.set()

    async def run(self) -> None:
        """Works until the batch has ended. Whatever stops it, it can be run again. Raises OSError."""
        self._state = await asyncio.to_thread(state_of, self._files)
        if self._state.status == "validating" and not await self._validate():
            return
        if self._state.status == "in_progress":
            journal = await asyncio.to_thread(Journal, self._files.output, self._files.errors)
            try:
                await self._compute(journal)
            finally:
                journal.close()
        if self._state.status == "finalizing":
            await asyncio.to_thread(self._publish)

    # Validating.

    async def _validate(self) -> bool:
        errors = await asyncio.to_thread(self._check_lines)
        if errors:
            self._state = BatchState(errors=errors)
        self._state.enter("failed" if errors else "in_progress")
        await asyncio.to_thread(self._write_state)
        if errors:
            self._files.forget_input()
        return not errors

    def _check_lines(self) -> list[BatchError]:
        """What is wrong with the input. Sets the batch's model and its number of lines."""
        seen, errors, model = set[str](), list[BatchError](), None
        for number, raw in self._lines():
            if len(errors) == MOST_ERRORS:
                break
            try:
                if len(raw) > MOST_LINE_BYTES:
                    raise LineFault("line_too_long", f"has more than {MOST_LINE_BYTES} bytes")
                line = read_line(raw)
                model = line.model if model is None else model
                self._check(line, seen, model)
            except LineFault as fault:
                errors.append(BatchError(fault.code, number, f"Line {number} {fault.message}.", fault.param))
        if len(seen) > MOST_LINES:
            said = f"The input has more than {MOST_LINES} lines: make several batches of it."
            errors.append(BatchError("too_many_tasks", None, said))
        elif not seen and not errors:
            errors.append(BatchError("empty_file", None, "The input has no lines: write a request in each."))
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
        if line.model != model:
            raise LineFault(
                "mismatched_model",
                f"asks for the model {line.model[:64]!r}, and the first line for {model[:64]!r}: a batch has "
                "one model",
                "body.model",
            )

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """The lines of the input, read in a thread that lets the event loop run."""
        slices = LineSlices(self._files.input, MOST_LINE_BYTES)
        try:
            while lines := slices.next():
                yield from lines
                rest()
        finally:
            slices.close()

    # Computing.

    async def _compute(self, journal: Journal) -> None:
        """Have each line answered that is not, until the batch ends early; then note the others' errors."""
        if self._state.ends_as != "completed":  # it was killed when it ended early
            self._early = self._state.ends_as
            self._ends_early.set()
        work = asyncio.create_task(self._answer_all(journal))
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
            await asyncio.to_thread(self._write_state)
            await asyncio.to_thread(self._note_left, journal)
        else:
            _raise_first(work.exception())
        self._state.failed, self._state.completed = journal.counts[1], journal.counts[0]
        self._state.enter("finalizing")
        await asyncio.to_thread(self._write_state)

    async def _answer_all(self, journal: Journal) -> None:
        async with aclosing(self._unanswered(journal)) as lines, asyncio.TaskGroup() as group:
            async for line in lines:
                await self._places.acquire()
                task = group.create_task(self._answer(line, journal))
                task.add_done_callback(lambda _: self._places.release())  # also if it never began

    async def _unanswered(self, journal: Journal) -> AsyncGenerator[BatchLine]:
        slices = LineSlices(self._files.input, MOST_LINE_BYTES)
        try:
            while lines := await asyncio.to_thread(slices.next):
                if time.monotonic() - self._looked > _LOOK_SECONDS:
                    await self._wait_for_room()
                for _, raw in lines:
                    line = read_line(raw)
                    if line.custom_id not in journal.done:
                        yield line
        finally:
            slices.close()

    async def _wait_for_room(self) -> None:
        """Waits until the folder has room for results. Nothing is lost meanwhile but time."""
        while not await asyncio.to_thread(self._folder.has_room):
            await asyncio.sleep(_FULL_SECONDS)
        self._looked = time.monotonic()

    async def _answer(self, line: BatchLine, journal: Journal) -> None:
        id = new_id("batch_req_")
        answer = await self._calls.answer(self.record.owner, line.url, bytes(line.body), id)
        output = answered(id, line.custom_id, answer.status, body_of(answer.body))
        await journal.keep(Result(line.custom_id, answer.status != 200, msgspec.json.encode(output)))
        self._state.completed, self._state.failed = journal.counts
        if time.monotonic() - self._told > _TOLD_SECONDS:
            self._told = time.monotonic()
            await asyncio.to_thread(self._write_state, durable=False)

    def _note_left(self, journal: Journal) -> None:
        """Write an error for each line that was not answered before the batch ended."""
        code, sentence = _ENDINGS[self._state.ends_as]
        slices = LineSlices(self._files.input, MOST_LINE_BYTES)
        try:
            while lines := slices.next():
                names = [read_line(raw).custom_id for _, raw in lines]
                left = [unanswered(new_id("batch_req_"), name, code, sentence) for name in names]
                journal.add(
                    [
                        Result(name, True, msgspec.json.encode(output))
                        for name, output in zip(names, left, strict=True)
                    ]
                )
        finally:
            slices.close()

    # Results.

    def _publish(self) -> None:
        """Make files of the results. It may be done again after a kill."""
        record = self.record
        for source, id, name in (
            (self._files.output, record.output_file_id, "output"),
            (self._files.errors, record.error_file_id, "error"),
        ):
            place = self._folder.file(id)
            with suppress(FileNotFoundError):
                if source.stat().st_size:
                    os.replace(source, place)
                else:
                    source.unlink()
            if place.exists():
                write_record(
                    self._folder.files / f"{id}.json",
                    FileRecord(
                        id=id,
                        owner=record.owner,
                        bytes=place.stat().st_size,
                        filename=f"{record.id}_{name}.jsonl",
                        purpose="batch_output",
                        expires_at=int(time.time()) + record.output_seconds,
                    ),
                )
        self._files.forget_input()
        self._state.enter(self._state.ends_as)
        self._write_state()

    def _write_state(self, *, durable: bool = True) -> None:
        with self._writing:  # a note that a thread began to write must not replace a later state
            write_record(self._files.state, self._state, durable=durable)

    @property
    def ended(self) -> bool:
        return self._state.status in ENDED


def _raise_first(error: BaseException | None) -> None:
    """Raise the first error of a group, if there is one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is not None:
        raise error
