"""Answers without the application: a request has not reached its route, or nobody serves it now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from http import HTTPStatus

import msgspec

from server.errors import ApiError, BadRequest, HttpError, Unavailable, error_body
from server.http.connection import limits


class TargetTooLong(ApiError):
    status = 414
    type = "RequestUriTooLongError"


MALFORMED = BadRequest("This is no valid HTTP/1.1 request. Check its first line, its headers and its length.")
TARGET_TOO_LONG = TargetTooLong(
    f"The path and query may have at most {limits.MAX_TARGET} bytes: send long values in the body."
)
HEAD_TOO_LARGE = HttpError(
    431,
    f"A request may have at most {limits.MAX_HEADERS} headers, and at most {limits.MAX_HEAD} bytes of them "
    "and its first line: send fewer.",
)
FRAMING_TOO_LARGE = BadRequest(
    f"The body has more than {limits.MAX_FRAMING} bytes of chunk extensions or trailers: send it without."
)
TOO_MANY_PIPELINED = Unavailable(
    f"At most {limits.MAX_PIPELINED} requests may wait on a connection for its answers."
)
LATE_FIRST_BYTE = HttpError(408, f"No request came for {limits.FIRST_BYTE_SECONDS:g} seconds: connect again.")
LATE_HEAD = HttpError(
    408, f"The request's headers took more than {limits.HEAD_SECONDS:g} seconds: send them at once."
)
LATE_BODY = HttpError(
    408,
    f"The body took more than {limits.BODY_SECONDS:g} seconds and one for each {limits.BODY_RATE} bytes: "
    "send it faster, or less in one request.",
)


def too_many_connections(most: int) -> ApiError:
    return Unavailable(
        f"All {most} connections are taken. Try again later, and keep connections open for several requests.",
        retry_after=1,
    )


def as_bytes(error: ApiError, target: bytes, more: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """A whole answer, after which the connection is closed, with `more` headers beside its own.

    `target` is the path that the request names, as far as it is known.
    """
    body = error_body(error, target.decode("latin-1"))
    return json_answer(error.status, body, error.headers(), more)


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
