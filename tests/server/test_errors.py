"""The errors that clients see: of requests that failed in the engine, and in the shape of each API."""

import pytest

from engine_core.protocol import Failed
from engine_core.reason_codes import QUARANTINED, SENTENCES
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
    error_body,
    from_engine,
    status_at,
)
from server.http.connection.connection_limits import as_bytes


@pytest.mark.parametrize(
    ("code", "error", "type"),
    [
        (400, "", "BadRequestError"),
        (500, "", "InternalServerError"),
        (500, QUARANTINED, "request_quarantined"),
        (503, "", "ServiceUnavailableError"),
    ],
)
def test_a_failure_has_a_status_and_a_type(code: int, error: str, type: str) -> None:
    found = from_engine(Failed(1, code, "words", error), retry_after=7)
    assert found.body() == {"error": {"message": "words", "type": type, "param": None, "code": code}}
    assert found.headers() == ({"Retry-After": "7"} if code == 503 else {})


def test_clients_are_told_a_code_where_the_reason_names_files_and_devices() -> None:
    detail = "the device failed: CUDA error at /usr/lib/libcuda.so, 0x7f00deadbeef"
    found = from_engine(Failed(1, 503, detail, "engine_given_up"), retry_after=7)
    assert found.body() == {
        "error": {
            "message": SENTENCES["engine_given_up"],
            "type": "engine_given_up",
            "param": None,
            "code": 503,
        }
    }
    assert found.headers() == {"Retry-After": "7"}
    assert str(found) == detail, "a program that runs the engine itself reads all"


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


@pytest.mark.parametrize(
    ("path", "error", "status", "body"),
    [
        ("/embed", BadRequest("no"), 413, {"error": "no", "error_type": "Validation"}),
        ("/predict", Overloaded("no"), 429, {"error": "no", "error_type": "Overloaded"}),
        ("/similarity", Internal("no"), 424, {"error": "no", "error_type": "Backend"}),
        ("/embed_all", Unavailable("no"), 503, {"error": "no", "error_type": "Unhealthy"}),
        ("/v2/chat", BadRequest("no"), 400, {"message": "no"}),
        ("/cohere/v2/embed", Unavailable("no"), 503, {"message": "no"}),
        *(
            (path, error, status, {"error": {"code": status, "message": "no", "type": kind}})
            for path, error, status, kind in (
                ("/completion", BadRequest("no"), 400, "invalid_request_error"),
                ("/infill", Unavailable("no"), 503, "unavailable_error"),
                ("/embedding", Internal("no"), 500, "server_error"),
            )
        ),
    ],
)
def test_errors_of_other_servers_own_paths(path: str, error: ApiError, status: int, body: object) -> None:
    assert (status_at(error, path), error_body(error, path)) == (status, body)
    assert as_bytes(error, path.encode() + b"?a=b").startswith(b"HTTP/1.1 %d " % status)


def test_what_a_connection_refuses_by_itself() -> None:
    full = as_bytes(Overloaded("no", retry_after=3), b"/v1/messages?beta=true")
    assert b'"type":"overloaded_error"' in full and b"retry-after: 3" in full
    assert b'"param"' in as_bytes(Overloaded("no"), b"/v1/completions")
