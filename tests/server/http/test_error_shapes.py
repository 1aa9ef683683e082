"""Errors in the shape of the API that was asked."""

from __future__ import annotations

import pytest

from server.errors import (
    ApiError,
    BadRequest,
    Internal,
    NotFound,
    Overloaded,
    TooLarge,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from server.http.connection.refusals import as_bytes
from server.http.error_shapes import error_body


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequest("no"), "invalid_request_error"),
        (Unauthorized("no"), "authentication_error"),
        (NotFound("no"), "not_found_error"),
        (TooLarge("no"), "request_too_large"),
        (TooManyRequests("no"), "rate_limit_error"),
        (Internal("no"), "api_error"),
        (Unavailable("no"), "overloaded_error"),
        (Overloaded("no"), "overloaded_error"),
    ],
)
def test_anthropics_errors(error: ApiError, kind: str) -> None:
    expected = {"type": "error", "error": {"type": kind, "message": "no"}}
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"):
        assert error_body(error, path) == expected
    assert error_body(error, "/v1/responses") == error.body()


def test_what_a_connection_refuses_by_itself() -> None:
    full = as_bytes(Overloaded("no", retry_after=3), b"/v1/messages?beta=true", [])
    assert b'"type":"overloaded_error"' in full and b"retry-after: 3" in full
    assert b'"param"' in as_bytes(Overloaded("no"), b"/v1/completions", [])
