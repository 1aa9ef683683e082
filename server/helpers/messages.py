"""Messages between an API process and its helpers, in the frames of `worker.child`.

An order is two frames, the order itself and the bytes that it is about, which may be none; an answer is one.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from server.errors import ApiError

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


class ReceivedError(ApiError):
    """Raised for an error that was sent."""

    def __init__(self, found: SentError) -> None:
        super().__init__(found.message, found.param, retry_after=found.retry_after)
        self.status, self.type, self.code = found.status, found.kind, found.code
        self.sentence = found.sentence


def sent_error(error: ApiError) -> SentError:
    said = error.message, error.param, error.retry_after, error.sentence
    return SentError(error.status, error.type, error.code, *said)
