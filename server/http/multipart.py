"""Reads a form with a file (multipart/form-data) while it comes, so that no file is in memory as a whole; or
as far as one of its fields, to give the whole form to the endpoint all the same."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from tempfile import SpooledTemporaryFile
from urllib.parse import unquote

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from server.errors import ApiError, BadRequest, HttpError, refused_if_full
from server.media.failures import FULL_TEMPORARY

MOST_FIELDS = 16
MOST_FIELD_BYTES = 8 << 10
"""Bytes of a field that is no file, and of the headers of a part."""

WRITTEN_BYTES = 1 << 20
"""Bytes of a file that are gathered before they are written."""
IN_MEMORY = 1 << 20
"""Bytes of a form that are held in memory; a longer one is held in a temporary file."""
_PIECE = 1 << 18
"""Bytes of a form that are given at once."""

_BOUNDARY = re.compile(r'boundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_DISPOSITION = re.compile(rb"^content-disposition:.*$", re.IGNORECASE | re.MULTILINE)
_PARAMETER = re.compile(rb';\s*(name|filename)=(?:"((?:\\.|[^"\\])*)"|([^\s;"]+))', re.IGNORECASE)
"""A parameter, between quotes or, as .NET writes it, without."""


class FormReader:
    """One form. What `push` returns is the content of its file."""

    def __init__(self, content_type: str, file_field: str = "file", most_fields: int = MOST_FIELDS) -> None:
        found = _BOUNDARY.search(content_type)
        if not content_type.lower().startswith("multipart/form-data") or found is None:
            raise HttpError(415, "Send the file as multipart/form-data, with the boundary in Content-Type.")
        self.values: list[tuple[str, str]] = []
        """The fields in the order in which they came, some of which may come several times."""
        self._most_fields = most_fields
        self.filename: str | None = None
        """The name of the file, once it has begun."""
        self.complete = False
        self._file_field = file_field
        self._delimiter = b"\r\n--" + (found[1] or found[2]).encode("latin-1", "replace")
        self._left = bytearray(b"\r\n")  # the first delimiter may stand at the very beginning
        self._part: str | None = None
        """The name of the field that is read; None before the first, and in heads."""
        self._in_head = False
        self._value = bytearray()

    @property
    def fields(self) -> dict[str, str]:
        """The last value of each field."""
        return dict(self.values)

    def push(self, data: bytes) -> bytes:
        """Read more of the form; returns what of the file has come."""
        self._left += data
        content = bytearray()
        while not self.complete and self._step(content):
            pass
        return bytes(content)

    async def receive(
        self, receive: Receive, write: Callable[[bytes], object], most: int, too_large: ApiError
    ) -> None:
        """Read the whole form, and have a thread write its file as it comes.

        Raises `too_large` behind `most` bytes, and ClientDisconnect.
        """
        waiting, received, more = bytearray(), 0, True
        while more:
            data, more = await _received(receive)
            received += len(data)
            if received > most:
                raise too_large
            waiting += self.push(data)
            if len(waiting) >= WRITTEN_BYTES or not more:
                await asyncio.to_thread(write, bytes(waiting))
                waiting.clear()
        self.check_complete()

    def check_complete(self) -> None:
        """Raises an error unless the form had its end, and a file."""
        if not self.complete:
            raise BadRequest("The form ends before its last boundary: send it whole.")
        if self.filename is None:
            raise BadRequest(f"The form has no file in its field `{self._file_field}`.", self._file_field)

    def _step(self, content: bytearray) -> bool:
        """Read one piece, if there is a whole one."""
        return self._read_head() if self._in_head else self._read_content(content)

    def _read_content(self, content: bytearray) -> bool:
        at = self._left.find(self._delimiter)
        end = at if at >= 0 else max(0, len(self._left) - len(self._delimiter) + 1)
        if self._part == self._file_field:
            content += self._left[:end]
        elif self._part is not None:
            self._value += self._left[:end]
            if len(self._value) > MOST_FIELD_BYTES:
                raise BadRequest(f"A field of the form has more than {MOST_FIELD_BYTES} bytes.")
        del self._left[:end]
        behind = len(self._delimiter)
        if at < 0 or len(self._left) < behind + 2:
            return False
        mark = bytes(self._left[behind : behind + 2])
        if mark not in (b"--", b"\r\n"):
            raise BadRequest("The form has a boundary that neither ends it nor begins a line.")
        self._end_part()
        del self._left[: behind + 2]
        self.complete, self._in_head = mark == b"--", mark == b"\r\n"
        return True

    def _end_part(self) -> None:
        if self._part is not None and self._part != self._file_field:
            if len(self.values) == self._most_fields:
                raise BadRequest(f"The form has more than {self._most_fields} fields.")
            self.values.append((self._part, self._value.decode("utf-8", "replace")))
        self._part = None
        self._value.clear()

    def _read_head(self) -> bool:
        end = self._left.find(b"\r\n\r\n")
        if end > MOST_FIELD_BYTES or (end < 0 and len(self._left) > MOST_FIELD_BYTES):
            raise BadRequest(f"A part of the form has more than {MOST_FIELD_BYTES} bytes of headers.")
        if end < 0:
            return False
        head = bytes(self._left[:end])
        found = _DISPOSITION.search(head)
        parameters = _PARAMETER.findall(found[0]) if found else []
        given = {
            name.lower(): (quoted.replace(b'\\"', b'"') or plain).decode("utf-8", "replace")
            for name, quoted, plain in parameters
        }
        if b"name" not in given:
            raise BadRequest("A part of the form has no name.")
        self._part = given[b"name"]
        if self._part == self._file_field:
            if self.filename is not None:
                raise BadRequest("The form has several files: send one at a time.", self._file_field)
            self.filename = unquote(given.get(b"filename", ""))[:255]
        del self._left[: end + 4]
        self._in_head = False
        return True


async def _received(receive: Receive) -> tuple[bytes, bool]:
    """Receives a piece of a body, and whether more follow. Raises ClientDisconnect."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), message.get("more_body", False)


@asynccontextmanager
async def peeked_form(
    reader: FormReader, field: str, receive: Receive, most: int, too_large: ApiError
) -> AsyncGenerator[tuple[str | None, Receive]]:
    """Reads a form until `field` has come; yields its value, and what receives the form from its beginning.

    The field of a form that names it behind its file is found at the end. Raises `too_large` behind `most`
    bytes, ClientDisconnect, and a 507 if the disk is full.
    """
    size, more = 0, True
    held = SpooledTemporaryFile[bytes](IN_MEMORY)
    try:
        with refused_if_full(FULL_TEMPORARY):
            while more and not reader.complete and field not in reader.fields:
                data, more = await _received(receive)
                size += len(data)
                if size > most:
                    raise too_large
                reader.push(data)
                await asyncio.to_thread(held.write, data)
            await asyncio.to_thread(held.seek, 0)
        yield reader.fields.get(field) or None, _again(held, size, more, receive)
    finally:
        with suppress(OSError):  # a full disk refuses what is left in the buffer once more
            await asyncio.to_thread(held.close)


def _again(held: SpooledTemporaryFile[bytes], size: int, more: bool, receive: Receive) -> Receive:
    """What receives the `size` bytes that are held, and then what still comes, if `more` does."""
    left: int | None = size

    async def receive_again() -> Message:
        nonlocal left
        if left is None:
            return await receive()
        data = await asyncio.to_thread(held.read, _PIECE)
        left = left - len(data) or None
        return {"type": "http.request", "body": data, "more_body": more or left is not None}

    return receive_again
