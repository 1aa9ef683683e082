"""Reads a body as JSON and checks it. Errors are in FastAPI's words, few, and short whatever was sent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from pydantic import ValidationError

from server.errors import BadRequest

MAX_REPORTED = 5
"""How many validation errors one answer names."""
MAX_INPUT = 200
"""How many characters of a wrong value an answer repeats."""

LONG = 16 << 10
"""What a body may cost to be read in the event loop, in bytes of text: so many take 5 to 25 ms."""
VALUE = 16
"""What a value costs beside its text, in bytes of text: it is checked, and may be an item or a message."""

MOST_VALUES = 20_000

_parse = msgspec.json.Decoder().decode
"""A fast parser. It refuses some texts that the standard library reads, such as NaN and lone surrogates, and
reads all others as the standard library does."""


class InvalidBody(BadRequest):
    type = "Bad Request"


def is_long(raw: bytes) -> bool:
    """Whether to read this body may take long. It counts what opens a value, in texts too."""
    size = len(raw)
    if size <= LONG // (VALUE + 1):  # it would not be long if every byte opened a value
        return False
    return size > LONG or size + VALUE * (raw.count(b'"') + raw.count(b"[") + raw.count(b"{")) > LONG


def check_values(raw: bytes) -> None:
    """Refuses, before it is parsed, a body with more values than an endpoint without texts has a use for."""
    values = raw.count(b",")
    if values > MOST_VALUES:
        raise BadRequest(f"This endpoint takes at most {MOST_VALUES} values in a request, got {values}.")


def read_json(raw: bytes, validate: Callable[..., Any], context: object = None) -> Any:
    """The validated body. `context` is what the body's own checks are told: IGNORES_UNKNOWN, or nothing."""
    if not raw:
        raise invalid_body([{"type": "missing", "msg": "Field required", "input": None}])
    content = _decode(raw)
    try:
        return validate(content, from_attributes=True, context=context)
    except ValidationError as error:
        raise invalid_body(error.errors(include_url=False)) from None


def _decode(raw: bytes) -> object:
    try:
        return _parse(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _decode_slowly(raw)


def _decode_slowly(raw: bytes) -> object:
    try:
        return json.loads(raw)
    except json.JSONDecodeError as error:
        fault = {"type": "json_invalid", "loc": [error.pos], "msg": "JSON decode error", "input": {}}
        raise invalid_body([{**fault, "ctx": {"error": error.msg}}]) from None
    except (ValueError, RecursionError):
        raise BadRequest("There was an error parsing the body") from None


def invalid_body(errors: Iterable[Mapping[str, Any]]) -> InvalidBody:
    """vLLM's text for a body that does not fit, from pydantic's errors, cut to what a reader can use."""
    found = list(errors)
    lines = [f"  {_shown(error)}" for error in found[:MAX_REPORTED]]
    count = f"{len(found)} validation error{'s' if len(found) != 1 else ''}:"
    return InvalidBody("\n".join([count, *lines]), _location(found[0]))


def _shown(error: Mapping[str, Any]) -> dict[str, object]:
    shown: dict[str, object] = {
        "type": error.get("type"),
        "loc": _location(error),
        "msg": error.get("msg"),
        "input": _shortened(error.get("input")),
    }
    if error.get("ctx"):
        shown["ctx"] = {key: _shortened(str(value)) for key, value in error["ctx"].items()}
    return shown


def _location(error: Mapping[str, Any]) -> str:
    # pydantic names the chosen form of a body (its tag, in parentheses) like a field of it.
    path = [str(part) for part in error.get("loc", ()) if not str(part).startswith("(")]
    return ".".join(["body", *path])


def _shortened(value: object) -> object:
    match value:
        case dict():
            return f"<dict of {len(value)} items>"
        case list() | tuple():
            return f"<list of {len(value)} items>"
        case str() | bytes() if len(value) > MAX_INPUT:
            return str(value[:MAX_INPUT]) + "…"
        case str() | bytes() | int() | float() | None:
            return value
        case _:
            return f"<{type(value).__name__}>"
