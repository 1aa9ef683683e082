"""Bodies as JSON: which are long, and what errors say of them."""

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from server.errors import MAX_MESSAGE, BadRequest
from server.schemas.body import LONG, MOST_VALUES, check_values, is_long, read_json

KINDS = TypeAdapter(dict[str, list[int] | int]).validate_python


def refusal_of(raw: bytes, validate: Any = KINDS) -> BadRequest:
    with pytest.raises(BadRequest) as refused:
        read_json(raw, validate)
    return refused.value


@pytest.mark.parametrize(
    ("body", "long"),
    [
        ({"prompt": "a" * 900}, False),
        ({"prompt": "a" * (LONG - 100)}, False),
        ({"prompt": "a" * LONG}, True),
        ({"prompt": list(range(2500))}, False),
        ({"input": ["a"] * 350}, False),
        ({"input": ["a"] * 500}, True),
        ({"input": [[1]] * 700}, False),
        ({"input": [[1]] * 1000}, True),
        ({"messages": [{"role": "user", "content": "hi"}] * 80}, False),
        ({"messages": [{"role": "user", "content": "hi"}] * 150}, True),
        ({"prompt": '"' * 950}, True),  # in texts, too: they are not looked into
    ],
)
def test_values_count_beside_bytes(body: object, long: bool) -> None:
    assert is_long(json.dumps(body).encode()) is long


def test_no_short_body_is_long() -> None:
    assert not is_long(b"[" * 950)


def test_errors_are_few_and_short() -> None:
    error = refusal_of(json.dumps({f"k{i}": ["x" * 100_000] for i in range(50)}).encode())
    assert len(error.message) <= MAX_MESSAGE
    assert error.message.endswith("; and 95 more") and error.message.count("body.k") == 5
    assert str(error.param).startswith("body.k0")


def test_a_large_wrong_value_is_not_repeated() -> None:
    error = refusal_of(json.dumps({"a": {"b": ["x" * 1000] * 1000}}).encode())
    assert "got an object" in error.message
    assert "xxx" not in error.message


def test_values_are_counted_before_they_are_read() -> None:
    check_values(b"[" + b"1," * MOST_VALUES + b"1]")
    with pytest.raises(BadRequest, match=f"at most {MOST_VALUES} values in a request, got {MOST_VALUES + 1}"):
        check_values(b"[" + b"1," * (MOST_VALUES + 1))


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[" * 100_000, b'{"a": 1', b"\xff", b'{"a": ' + b"9" * 5000 + b"}"]
)
def test_what_is_no_json(raw: bytes) -> None:
    assert refusal_of(raw).status == 400


def test_a_body_may_be_in_any_encoding_of_json() -> None:
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32-be"):
        assert read_json('{"é": 1}'.encode(encoding), KINDS) == {"é": 1}
