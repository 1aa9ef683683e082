"""Answers that a connection gives by itself, because a request has not reached its route."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

import msgspec

from server.errors import ApiError, BadRequest, Unavailable
from server.http.connection import limits
from server.http.error_shapes import error_body


class RequestTimeout(ApiError):
    status = 408
    type = "RequestTimeoutError"


class TargetTooLong(ApiError):
    status = 414
    type = "RequestUriTooLongError"


class HeadTooLarge(ApiError):
    status = 431
    type = "RequestHeaderFieldsTooLargeError"


def malformed() -> ApiError:
    return BadRequest("This is no valid HTTP/1.1 request. Check its first line, its headers and its length.")


def target_too_long() -> ApiError:
    return TargetTooLong(
        f"The path and query may have at most {limits.MAX_TARGET} bytes: send long values in the body."
    )


def head_too_large() -> ApiError:
    return HeadTooLarge(
        f"A request may have at most {limits.MAX_HEADERS} headers, and at most {limits.MAX_HEAD} bytes of "
        "them and its first line: send fewer."
    )


def framing_too_large() -> ApiError:
    return BadRequest(
        f"The body has more than {limits.MAX_FRAMING} bytes of chunk extensions or trailers: send it without."
    )


def too_many_pipelined() -> ApiError:
    return Unavailable(f"At most {limits.MAX_PIPELINED} requests may wait on a connection for its answers.")


def late_first_byte() -> ApiError:
    return RequestTimeout(f"No request came for {limits.FIRST_BYTE_SECONDS:g} seconds: connect again.")


def late_head() -> ApiError:
    return RequestTimeout(
        f"The request's headers took more than {limits.HEAD_SECONDS:g} seconds: send them at once."
    )


def late_body() -> ApiError:
    return RequestTimeout(
        f"The body took more than {limits.BODY_SECONDS:g} seconds and one for each {limits.BODY_RATE} bytes: "
        "send it faster, or less in one request."
    )


def too_many_connections(most: int) -> ApiError:
    return Unavailable(
        f"All {most} connections are taken. Try again later, and keep connections open for several requests.",
        retry_after=1,
    )


def as_bytes(error: ApiError, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A whole answer, after which the connection is closed, with these headers beside its own.

    `target` is the path that the request names, as far as it is known.
    """
    body = msgspec.json.encode(error_body(error, target.decode("latin-1")))
    own = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **error.headers(),
    }
    lines = [
        b"HTTP/1.1 %d %s" % (error.status, HTTPStatus(error.status).phrase.encode()),
        *(b"%s: %s" % pair for pair in headers),
        *(f"{name.lower()}: {value}".encode() for name, value in own.items()),
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
