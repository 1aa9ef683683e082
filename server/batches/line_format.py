"""Lines of OpenAI's batch files: requests in, answers out, an object of JSON each."""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from typing import Any

import msgspec

from server.text.characters import whole_characters


class LineFault(Exception):
    """A line that is no request. `code` is OpenAI's word for the reason; the message goes on after a name."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


class BatchLine(msgspec.Struct, frozen=True):
    """A request of a batch."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"

    @property
    def model(self) -> str:
        """The model that its body names, or an empty text."""
        named = _decode_asked(self.body).model
        return named if isinstance(named, str) else ""


_PATH = re.compile("/[!-~]*")
"""What the first line of a request can hold."""


class _Asked(msgspec.Struct):
    """The fields of a body that are looked at before its endpoint reads it."""

    model: object = None
    stream: object = None
    encoding_format: object = None


_decode_line = msgspec.json.Decoder(BatchLine).decode
_decode_asked = msgspec.json.Decoder(_Asked).decode


def read_line(raw: bytes) -> BatchLine:
    """The request in a line. A byte order mark before it is passed over. Raises LineFault."""
    try:
        line, asked = _decode(raw.removeprefix(BOM_UTF8))
    except msgspec.ValidationError:
        raise LineFault(
            "missing_required_parameter", "needs custom_id and url as strings, and body as an object"
        ) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise LineFault("invalid_json_line", f"is not JSON: {error}") from None
    if line.method != "POST":
        raise LineFault("invalid_method", "has a method that is not POST: method must be POST", "method")
    if not _PATH.fullmatch(line.url):
        raise LineFault(
            "invalid_url",
            f"has the url {line.url[:64]!r}: url is a path such as /v1/chat/completions",
            "url",
        )
    if asked.stream:
        raise LineFault(
            "invalid_request", "asks for a stream: an answer in a file cannot be streamed", "body.stream"
        )
    if asked.encoding_format in ("bytes", "bytes_only"):
        raise LineFault(
            "invalid_request",
            "asks for bytes: an answer in a file is JSON, which has vectors as float or base64",
            "body.encoding_format",
        )
    return line


def _decode(raw: bytes) -> tuple[BatchLine, _Asked]:
    try:
        line = _decode_line(raw)
        return line, _decode_asked(line.body)
    except msgspec.DecodeError:
        if b"\\u" not in raw or not isinstance(given := json.loads(raw), dict):
            raise
    # What a tool has answered may have half of a surrogate pair, for which a sign stands from here on.
    body = whole_characters(json.dumps(given.get("body"), ensure_ascii=False))
    line = _decode_line(json.dumps({**given, "body": json.loads(body)}))
    return line, _decode_asked(line.body)


def answered(id: str, name: str, status: int, body: object) -> dict[str, Any]:
    """The output for a request that was answered, by a result or by the server's error.

    The server was told the id, and has it in its log and in the answer's own id.
    """
    response = {"status_code": status, "request_id": id, "body": body}
    return {"id": id, "custom_id": name, "response": response, "error": None}


def unanswered(id: str, name: str, code: str, reason: str) -> dict[str, Any]:
    """The output for a request without an answer."""
    return {"id": id, "custom_id": name, "response": None, "error": {"code": code, "message": reason}}


def body_of(content: bytes) -> object:
    """An answer's body for the output. JSON in one line stays the bytes that came.

    So a vector's numbers are neither read nor written again, which would cost more than to send them.
    """
    try:
        text = content.decode()
        if "\n" not in text:
            return msgspec.json.decode(content, type=msgspec.Raw)
        return json.loads(text)
    except (ValueError, msgspec.DecodeError):  # of text that is not JSON, too
        return content.decode("utf-8", "replace")


LONGEST_PAUSE = 30.0


def pause_of(retry_after: str | None) -> float:
    """Seconds to wait, as a header asks, but neither none nor for ever."""
    try:
        seconds = float(retry_after or 1)
    except ValueError:  # it may be a date
        seconds = 1.0
    return min(LONGEST_PAUSE, max(0.1, seconds))
