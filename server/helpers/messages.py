"""Messages between an API process and its helpers, in the frames of `worker.child`.

An order is two frames, the order itself and the bytes that it is about, which may be none; an answer is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from server.errors import ApiError, BadRequest

FollowOrder = Callable[[bytes, bytes], msgspec.Struct]
"""Follows an encoded order about some bytes, and returns the answer, or raises the error to be sent."""

NO_MEMORY = (
    "Reading this request took more memory than a request may. Send less text, or fewer values, in one."
)


class HelperSetup(msgspec.Struct, frozen=True):
    """The settings with which a helper process is started."""

    socket: int
    """The inherited descriptor of its end of the connection."""
    name: str
    module: str
    own: bytes
    """What its job is opened with."""
    memory: int
    processor_seconds: float
    log_style: str


class SentError(msgspec.Struct, frozen=True, tag=True):
    """An error with which a request ends elsewhere, without the traceback, which would keep what was read."""

    status: int
    kind: str
    code: str | None
    message: str
    param: str | None
    retry_after: int | None
    sentence: str


def received_error(found: SentError) -> ApiError:
    """The error that was sent, to be raised here."""
    kind = BadRequest if found.status == BadRequest.status else ApiError
    error = kind(found.message, found.param, retry_after=found.retry_after)
    error.status, error.type, error.code, error.sentence = (
        found.status,
        found.kind,
        found.code,
        found.sentence,
    )
    return error


def sent_error(error: ApiError) -> SentError:
    said = error.message, error.param, error.retry_after, error.sentence
    return SentError(error.status, error.type, error.code, *said)


def to_msgpack(message: Any) -> bytes:
    """A message in msgpack, which has integers of 64 bits only: floats stand for larger ones, such as a JSON
    schema gives as bounds."""
    try:
        return msgspec.msgpack.encode(message)
    except OverflowError:
        return msgspec.msgpack.encode(_with_floats(message))


def _with_floats(value: Any) -> Any:
    match value:
        case msgspec.Struct():
            fields = {name: _with_floats(getattr(value, name)) for name in value.__struct_fields__}
            return msgspec.structs.replace(value, **fields)
        case dict():
            return {name: _with_floats(each) for name, each in value.items()}
        case list():
            return [_with_floats(each) for each in value]
        case int() if not -(1 << 63) <= value < 1 << 64:
            return float(str(value))  # infinity, if no float is as large
        case _:
            return value
