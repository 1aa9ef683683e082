"""The errors that clients see when a request has failed in the engine."""

from __future__ import annotations

import pytest

from engine_core.protocol import QUARANTINED, Failed
from engine_core.reasons import SENTENCES
from server.errors import from_engine


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
