"""Limits before a request has reached its route: what a client may send, how long it may take, how many may
be connected; and the answers to those who pass them.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterable, Mapping
from functools import lru_cache
from http import HTTPStatus

import msgspec

from server.errors import ApiError, BadRequest, HttpError, Unavailable, error_body, status_at

MAX_HEAD = 64 << 10
"""Bytes of a request's first line and headers together, unless the operator says another number."""
MAX_HEADERS = 100
MAX_TARGET = 8 << 10
"""Bytes of the path and query."""
MAX_FRAMING = 64 << 10
"""Bytes in one go of a body that are no content: sizes and extensions of chunks, and trailers."""
MAX_PIPELINED = 32
"""Requests that wait on a connection for the answer to an earlier one."""

FIRST_BYTE_SECONDS = 5.0
HEAD_SECONDS = 10.0
KEEP_ALIVE_SECONDS = 5.0
"""Seconds from an answer to the next request, or to the end of a body that the answer did not wait for."""
BODY_SECONDS, BODY_RATE = 30.0, 16 << 10
"""A body has so many seconds, and one more for so many bytes of it."""
READER_SECONDS, MOST_SILENCES = 30.0, 4
"""A reader is given up that has taken no byte of much in so many seconds, or of less in so many of these."""
MUCH = 256 << 10
"""Bytes of an answer that are much to wait for their reader."""
LINGER_SECONDS = 1.0
"""Seconds for which a refused client that may still be sending can fetch its answer."""
MOST_LINGERING = 8
"""Connections beyond the most, which are refused, that may linger at a time."""
RESERVED = 8
"""Connections beyond the most on which PROBE_PATHS are answered, and nothing else. Of those that have sent no
request the oldest gives way to the next that comes."""
PROBE_PATHS = frozenset({b"/live", b"/health", b"/ready", b"/ping", b"/metrics"})
"""Paths by which operators see how a server does, which they want most when all connections are taken."""

MAX_PENDING, MAX_PENDING_OF_STREAM = 32 << 10, 16 << 10
"""Bytes of answers in this process, on one connection, above which no more are made until they are read."""
MAX_UNSENT, MAX_UNSENT_OF_STREAM = 320 << 10, 32 << 10
"""Bytes of answers that the system takes and has not sent, on one connection. A stream is generated while it
is read, so what waits of it is work that may be for nobody."""

LEAST_DESCRIPTORS = 64
_OWN_DESCRIPTORS = 48 + RESERVED
"""File descriptors that an API process may need beside those of its clients, with one replica: 28 in use."""
_FOR_A_REPLICA = 4

PROBE_AFTER_SECONDS, PROBE_INTERVAL_SECONDS, PROBES = 30, 10, 3
"""A client that is silent is asked so often whether it is still there."""
UNACKNOWLEDGED_SECONDS = 120
"""Seconds after which a client is gone that does not acknowledge what was sent."""

_log = logging.getLogger(__name__)


def most_connections(asked: int, replicas: int) -> int:
    """How many connections this process can hold at once: `asked`, or as many as it has descriptors for.

    The soft limit of descriptors is raised as far as it must and can be.
    """
    own = _OWN_DESCRIPTORS + _FOR_A_REPLICA * (replicas - 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < asked + own:
        soft = asked + own if hard == resource.RLIM_INFINITY else min(hard, asked + own)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= asked + own:
        return asked
    _log.warning(
        "at most %d connections instead of %d: the limit of file descriptors is %d (ulimit -n)",
        max(1, soft - own),
        asked,
        soft,
    )
    return max(1, soft - own)


def why_too_few_descriptors() -> str | None:
    """Why the server cannot start, if its limit of file descriptors is too low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= LEAST_DESCRIPTORS:
        return None
    return (
        f"the limit of file descriptors is {hard}, and at least {LEAST_DESCRIPTORS} are needed: raise it "
        "(ulimit -n, or LimitNOFILE= of systemd)"
    )


class TargetTooLong(ApiError):
    status = 414
    type = "RequestUriTooLongError"


MALFORMED = BadRequest("This is no valid HTTP/1.1 request. Check its first line, its headers and its length.")
TARGET_TOO_LONG = TargetTooLong(
    f"The path and query may have at most {MAX_TARGET} bytes: send long values in the body."
)
FRAMING_TOO_LARGE = BadRequest(
    f"The body has more than {MAX_FRAMING} bytes of chunk extensions or trailers: send it without."
)
TOO_MANY_PIPELINED = Unavailable(
    f"At most {MAX_PIPELINED} requests may wait on a connection for its answers."
)
LATE_FIRST_BYTE = HttpError(408, f"No request came for {FIRST_BYTE_SECONDS:g} seconds: connect again.")
LATE_HEAD = HttpError(
    408, f"The request's headers took more than {HEAD_SECONDS:g} seconds: send them at once."
)
LATE_BODY = HttpError(
    408,
    f"The body took more than {BODY_SECONDS:g} seconds and one for each {BODY_RATE} bytes: "
    "send it faster, or less in one request.",
)


def head_too_large(most_bytes: int, most_headers: int) -> ApiError:
    return HttpError(
        431,
        f"A request may have at most {most_headers} headers, and at most {most_bytes} bytes of them "
        "and its first line: send fewer.",
    )


def too_many_connections(most: int) -> ApiError:
    return Unavailable(
        f"All {most} connections are taken. Try again later, and keep connections open for several requests.",
        retry_after=1,
    )


@lru_cache(maxsize=64)
def as_bytes(error: ApiError, target: bytes, more: tuple[tuple[bytes, bytes], ...] = ()) -> bytes:
    """A whole answer, after which the connection is closed, with `more` headers beside its own.

    `target` is the path that the request names, as far as it is known. It is kept, because a crowd that is
    refused gets the same error over and over.
    """
    path = target.decode("latin-1").partition("?")[0]
    body = error_body(error, path)
    return json_answer(status_at(error, path), body, error.headers(), more)


def json_answer(
    status: int, content: object, headers: Mapping[str, str], more: Iterable[tuple[bytes, bytes]] = ()
) -> bytes:
    """A whole answer in JSON, after which the connection is closed."""
    body = msgspec.json.encode(content)
    own = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **headers,
    }
    lines = [
        b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode()),
        *(b"%s: %s" % pair for pair in more),
        *(f"{name.lower()}: {value}".encode() for name, value in own.items()),
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
