"""Errors that another process has found, with which requests end here."""

from __future__ import annotations

import msgspec

from server.errors import ApiError


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The error with which the request ends."""

    status: int
    kind: str
    message: str
    param: str | None
    retry_after: int | None = None


NO_MEMORY = (
    "Reading this request took more memory than a request may. Send less text, or fewer values, in one."
)


def refused(error: ApiError) -> Refused:
    return Refused(error.status, error.type, error.message, error.param, error.retry_after)


class Refusal(ApiError):
    """The error that another process has found."""

    def __init__(self, found: Refused) -> None:
        super().__init__(found.message, found.param, retry_after=found.retry_after)
        self.status = found.status
        self.type = found.kind
