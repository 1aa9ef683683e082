"""What processes that read media have in common: how they tell of a failure, and the memory they may keep."""

from __future__ import annotations

import logging

from models.media.item import MediaError
from server.errors import DISK_FULL, ApiError, BadRequest, HttpError, Internal
from server.offload.messages import SentError, sent_error

MUCH, MOST_LEFT = 64 << 20, 512 << 20
"""Bytes left of an item that are given back, and at which the process ends after its answer."""

FULL_TEMPORARY = (
    "The server's folder for temporary files is full. Try again later; the operator can make room there, or "
    "name another one by TMPDIR."
)

_log = logging.getLogger(__name__)


def sent_failure(error: Exception, what: str, param: str | None = None) -> SentError:
    """The answer if `what` could not be read; `param`: the field that holds it."""
    match error:
        case ApiError():
            return sent_error(error)
        case MediaError():
            return sent_error(BadRequest(str(error), param))
        case MemoryError():
            return sent_error(BadRequest(f"Decoding a {what} took more memory than it may.", param))
        case OSError() if error.errno in DISK_FULL:
            return sent_error(HttpError(507, FULL_TEMPORARY))
        case _:
            _log.exception("a %s could not be read", what, exc_info=error)
            return sent_error(Internal("Internal server error"))
