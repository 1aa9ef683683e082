"""The lines of a batch: where they stand in its input, and which have a result.

Python's sqlite3 lets other threads run at each row, and then waits for the event loop to let it run again. So
many rows travel as one: as a list in JSON, or as the values of one statement.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import msgspec

from server.batches.conversations import Conversations
from server.batches.database import Database
from server.batches.folder import FileRecord, Folder, NewFile, add_file, damaged_content, read_row
from server.batches.line_format import BatchLine, read_line
from server.batches.records import BatchRecord, BatchState, set_state
from server.batches.responses import Turn
from server.errors import ApiError

_SLICE, _SLICE_BYTES, _REST = 64, 1 << 20, 0.001
"""Lines or bytes that are read in one go, and the seconds for which the event loop then runs alone."""
_NAMES = 2000
"""Names of lines that are read or written in one go."""

_log = logging.getLogger(__name__)


class Result(NamedTuple):
    number: int
    failed: bool
    line: bytes
    """The line of the output, without its end."""
    turn: Turn | None = None
    """The turn that it adds to a conversation."""


class InputLine(NamedTuple):
    """A line of an input, and where it stands there."""

    number: int
    place: int
    raw: bytes
    """The line; of one that is too long only its beginning."""
    size: int


def read_input(folder: Folder, id: str, most: int) -> Iterator[InputLine]:
    """The lines of an input that are not empty, read in a thread that lets the event loop run.

    `most` is the length of the longest line. Raises Damaged at the end, if it is not what was sent.
    """
    path = folder.content(id)
    rows = folder.database.read("SELECT * FROM files WHERE id = ?", id)
    if not rows:
        raise damaged_content(path, "is no longer in the database")
    record = read_row(rows[0], FileRecord)
    number = place = checksum = since = 0
    with open(folder.open_content(id, record.bytes), "rb") as file:
        while raw := file.readline(most + 1):
            size, number = len(raw), number + 1
            checksum = zlib.crc32(raw, checksum)
            while size > most and (more := file.readline(_SLICE_BYTES)):
                checksum, size = zlib.crc32(more, checksum), size + len(more)
                if more.endswith(b"\n"):
                    break
            if raw.strip():
                yield InputLine(number, place, raw, size)
            place, since = place + size, since + size
            if since > _SLICE_BYTES or not number % _SLICE:
                since = 0
                time.sleep(_REST)
    if checksum != record.checksum:
        raise damaged_content(path, "has other bytes than those that were sent")


class BatchLines:
    """The lines and results of a batch in the database. All functions but `keep` block."""

    def __init__(self, folder: Folder, record: BatchRecord) -> None:
        self._folder, self._record = folder, record
        self._database: Database = folder.database
        self._conversations = Conversations(folder)
        self._new: list[tuple[int, str, int, int, int]] = []
        self._waiting: list[Result] = []
        self._turn = asyncio.Lock()

    # Lines.

    def note(self, line: InputLine, custom_id: str) -> None:
        """Note a line of the input that is a request."""
        name = msgspec.json.encode(custom_id).decode()  # SQLite would end a text at a NUL
        self._new.append((line.number, name, line.place, len(line.raw), zlib.crc32(line.raw)))
        if len(self._new) == _NAMES:
            self.write_noted()

    def write_noted(self) -> None:
        """Write the lines that were noted; it may be done again after a kill."""
        new, self._new = self._new, []
        fields = ", ".join(f"json_extract(value, '$[{index}]')" for index in range(5))
        with self._database.write(durable=False) as writer:
            writer.execute(
                f"INSERT OR REPLACE INTO lines SELECT ?, {fields} FROM json_each(?)",
                (self._record.id, msgspec.json.encode(new).decode()),
            )

    def unanswered(self, after: int) -> list[tuple[int, BatchLine]]:
        """The next lines behind a number that have no result. Raises Damaged if they have changed."""
        rows = self._left(after, "place, bytes, checksum", _SLICE)
        found, size = list[tuple[int, BatchLine]](), 0
        if not rows:
            return found
        path = self._folder.content(self._record.input_file_id)
        file = self._folder.open_content(self._record.input_file_id)
        try:
            for number, place, length, checksum in rows:
                raw = os.pread(file, length, place)
                if zlib.crc32(raw) != checksum:
                    raise damaged_content(path, f"has another line {number} than when the batch began")
                found.append((number, read_line(raw)))
                if (size := size + length) > _SLICE_BYTES:
                    break
        finally:
            os.close(file)
        return found

    def _left(self, after: int, fields: str, most: int) -> list[list[Any]]:
        [[rows]] = self._database.read(
            f"SELECT json_group_array(json_array(number, {fields})) FROM "
            "(SELECT * FROM lines WHERE batch = ? AND number > ? AND NOT EXISTS "
            "(SELECT 1 FROM results WHERE batch = lines.batch AND number = lines.number) "
            "ORDER BY number LIMIT ?)",
            *(self._record.id, after, most),
        )
        return sorted(msgspec.json.decode(rows))

    def names_left(self) -> Iterator[list[tuple[int, str]]]:
        """The numbers and custom_ids of lines without a result, some at a time."""
        after = 0
        while rows := self._left(after, "custom_id", _NAMES):
            yield [(number, msgspec.json.decode(name)) for number, name in rows]
            after = rows[-1][0]

    # Results.

    async def keep(self, result: Result) -> None:
        """Adds a result, together with those of others that wait meanwhile. Raises OSError if it cannot."""
        self._waiting.append(result)
        async with self._turn:
            if self._waiting:
                taken, self._waiting = self._waiting, []
                await asyncio.to_thread(self.add, taken)

    def add(self, results: Sequence[Result]) -> None:
        """Add results of lines that have none, so that they are on the disk afterwards.

        The same transaction adds their turns to conversations, so that each is there once, whenever the
        process ends.
        """
        id, counts = self._record.id, [0, 0]
        with self._database.write() as writer:
            results = [self._add_turn(writer, each, each.turn) if each.turn else each for each in results]
            for failed in (False, True):
                some = [each for each in results if each.failed == failed]
                if some:
                    values = [value for each in some for value in (id, each.number, failed, each.line)]
                    counts[failed] = writer.execute(
                        "INSERT OR IGNORE INTO results (batch, number, failed, line) VALUES "
                        + ", ".join(["(?, ?, ?, ?)"] * len(some)),
                        values,
                    ).rowcount
            counted = writer.execute(
                "UPDATE batches SET completed = completed + ?, failed = failed + ? "
                "WHERE id = ? AND ended_at IS NULL",
                (*counts, id),
            )
            if not counted.rowcount:  # it has ended, by another process
                writer.execute("DELETE FROM results WHERE batch = ?", (id,))

    def _add_turn(self, writer: Any, result: Result, turn: Turn) -> Result:
        """Add the turn of a line that has no result yet. Returns the result, which says if that cannot be."""
        unanswered = (
            "SELECT 1 FROM batches WHERE id = ? AND ended_at IS NULL AND NOT EXISTS "
            "(SELECT 1 FROM results WHERE batch = batches.id AND number = ?)"
        )
        if writer.execute(unanswered, (self._record.id, result.number)).fetchone():
            try:
                self._conversations.add_in(writer, turn.owner, turn.conversation, turn.items)
            except ApiError as error:
                said = "line %d of %s is not added to its conversation: %s"
                _log.warning(said, result.number, self._record.id, error)
                line = msgspec.json.decode(result.line)
                line["response"]["body"]["conversation"] = None
                return result._replace(line=msgspec.json.encode(line))
        return result

    def publish(self, state: BatchState) -> None:
        """Make files of the results, and end the batch. It may be done again after a kill."""
        with closing(NewFile(self._folder)) as output, closing(NewFile(self._folder)) as errors:
            records = [self._fill(output, 0, "output"), self._fill(errors, 1, "error")]
            state.output_file_id, state.error_file_id = (record and record.id for record in records)
            state.enter(state.ends_as)
            with self._database.write() as writer:
                is_ours = set_state(writer, self._record.id, state)
                for record in records:
                    if is_ours and record is not None:
                        add_file(writer, record)
            output.kept, errors.kept = (is_ours and record is not None for record in records)

    def _fill(self, file: NewFile, failed: int, name: str) -> FileRecord | None:
        """Write the answers, or the errors, in the order in which they came; None if there are none."""
        after = 0
        while rows := self._database.read(
            "SELECT place, line FROM results WHERE batch = ? AND failed = ? AND place > ? "
            "ORDER BY place LIMIT ?",
            *(self._record.id, failed, after, _SLICE),
        ):
            file.write(b"".join(row["line"] + b"\n" for row in rows))
            after = rows[-1]["place"]
        record = self._record
        filename = f"{record.id}_{name}.jsonl"
        return file.finish(record.owner, filename, "batch_output", record.output_seconds) if after else None
