"""Repairs what a model and its tools have written in a conversation, so that no check of it refuses it.

A client sends back all that came before: one broken call would have every later request refused. What users
and systems say is left as it is, because a fault of theirs is one of the request.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from math import isfinite
from typing import Any, ClassVar, Self

from pydantic import model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler

from server.errors import BadRequest
from server.media.media_parts import MEDIA_PARTS, ROWS, read_part
from server.schemas.messages import INPUT, MOST_NAMED, TEXT_PARTS, TemplateOptions, call_of
from server.text.characters import whole_characters

WRITTEN = ("assistant", "tool", "function")
"""The roles of messages that a model or its tools have written."""

TEXTS = (*TEXT_PARTS, "reasoning_text", "summary_text")
"""Types of parts that are text, in the APIs that have such."""
_THOUGHTS = ("thinking", "reasoning", "redacted_thinking")
"""Types of parts that are reasoning."""
_DEEPEST = 64
"""The levels of arguments that are read: what is nested deeper is text."""
_BLOB = re.compile(r"\S{1024,}")
"""What no model reads, such as a file in base64."""

Repairs = Counter[str]
"""Counts each kind of damage, in words for the client."""


class HistoryOptions(TemplateOptions):
    """A body with `messages`, in which those that a model or its tools have written are repaired."""

    repairs: ClassVar[Sequence[str]] = ()
    """Sentences on what was repaired and left out of a body, which has its own if there are any."""

    @model_validator(mode="wrap")
    @classmethod
    def repair(cls, body: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        given: dict[str, Any] = body if isinstance(body, dict) else {}
        messages, tools = given.get("messages"), given.get("tools")
        repairs, notes = Repairs(), list[str]()
        if type(messages) is list and any(map(_is_written, messages)):
            body = given = {**given, "messages": [repaired(each, repairs) for each in messages]}
        elif type(messages) is list and messages and type(messages[0]) is list:  # those of a batch
            several = [
                [repaired(each, repairs) for each in said] if isinstance(said, list) else said
                for said in messages
            ]
            body = given = {**given, "messages": several}
        if tools and type(tools) is list:
            kept = [tool for tool in tools if not _is_foreign(tool)]
            body = {**given, "tools": kept or None}
            if left_out := dict.fromkeys(named(tool["type"]) for tool in tools if _is_foreign(tool)):
                names = ", ".join([*left_out][:MOST_NAMED])
                notes.append(f"tools left out, which this server does not run: {names}")
        found = check(body)
        if repairs:
            each = [f"{what} ({count})" for what, count in repairs.most_common(MOST_NAMED)]
            notes.append(f"repaired in messages of the assistant and of tools: {', '.join(each)}")
        if notes:
            vars(found)["repairs"] = notes
        return found


def _is_foreign(tool: Any) -> bool:
    """Whether a tool has a type that this server does not know."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind not in ("function", "custom")


def named(kind: object) -> str:
    """A type as a warning names it."""
    return whole_characters(kind)[:64] if isinstance(kind, str) and kind else "none"


def _is_written(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in WRITTEN


def repaired(message: Any, repairs: Repairs) -> Any:
    """A message as chat completions has it, if a model or its tools have written it; any other as it is."""
    if not _is_written(message):
        return message
    found = {**message, "content": _content(message.get("content"), repairs)}
    for name in ("reasoning", "reasoning_content", "name", "tool_call_id"):
        if message.get(name) is not None:
            found[name] = whole_characters(text_in(message[name])) or None
    thoughts = found.get("reasoning_content") or found.get("reasoning")
    if isinstance(parts := found["content"], list):
        thoughts = thoughts or whole_characters("".join(text_in(each) for each in parts if _is_thought(each)))
        found["content"] = [part for part in parts if not _is_thought(part)]
    if (calls := message.get("tool_calls")) is not None:
        found["tool_calls"] = [_call(call, repairs) for call in listed(calls)] or None
    if thoughts and message["role"] == "assistant":  # templates read one name or another
        found["reasoning_content"] = found["reasoning"] = thoughts
        if not (found["content"] and calls):  # gpt-oss' refuses `thinking` beside a text and calls
            found.setdefault("thinking", thoughts)
    return found


def _is_thought(part: dict[str, Any]) -> bool:
    return part["type"] in _THOUGHTS


def _content(content: Any, repairs: Repairs) -> Any:
    """A content as chat completions has it, with parts of reasoning in it as they are."""
    if isinstance(content, list):
        return [_part(part, repairs) for part in content]
    if not isinstance(content, str | None):
        repairs["contents that are neither texts nor parts"] += 1
    return content if content is None else whole_characters(as_text(content))


def _part(part: Any, repairs: Repairs) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == ROWS or kind in _THOUGHTS:
        return part
    if kind in TEXTS:
        text = part.get("refusal" if kind == "refusal" else "text") or ""
        return {"type": "text", "text": as_text(text)}
    if isinstance(kind, str) and kind in MEDIA_PARTS:
        try:
            return read_part(part)
        except BadRequest:
            pass
    if not isinstance(part, str):
        repairs[f"parts of the type {named(kind)}, shown as text"] += 1
    return {"type": "text", "text": as_text(part)}


def _call(call: Any, repairs: Repairs) -> dict[str, Any]:
    call = call_of(call) if isinstance(call, dict) else {"function": {"arguments": call}}
    function = call.get("function")
    inside = function if isinstance(function, dict) else call
    name, id = inside.get("name"), call.get("id")
    if not isinstance(name, str) or not name:
        repairs["calls without a name"] += 1
        name = "unnamed"
    function = {"name": whole_characters(name), "arguments": arguments_of(inside.get("arguments"), repairs)}
    return {**call, "id": whole_characters(text_in(id)) or None, "type": "function", "function": function}


def listed(value: Any) -> list[Any]:
    """A list, or what should have been one as its only entry."""
    return value if isinstance(value, list) else [value]


def arguments_of(given: Any, repairs: Repairs) -> dict[str, Any]:
    """The arguments of a call as an object: what cannot be read as one is its text `input`."""
    if given is None or given == "":
        return {}
    read = given
    try:
        for _ in range(2):  # some are JSON within JSON
            if isinstance(read, str):
                read = json.loads(read)
        if isinstance(read, dict):
            return _clean_tree(read, _DEEPEST)
    except (ValueError, RecursionError):
        pass
    repairs["arguments that are not a JSON object, shown as `input`"] += 1
    return {INPUT: whole_characters(as_text(given))}


def as_text(value: Any) -> str:
    """What stands for a value where only text can: its JSON, without what is no text for a model."""
    if isinstance(value, str):
        return whole_characters(value)
    try:
        return _BLOB.sub("…", whole_characters(json.dumps(value, ensure_ascii=False)))
    except RecursionError:
        return "…"


def text_in(value: Any) -> str:
    """The text of a value that should have been one."""
    if isinstance(value, list):
        return "".join(map(text_in, value))
    if isinstance(value, dict):
        return next((text_in(value[name]) for name in ("text", "thinking", "summary") if name in value), "")
    return "" if value is None else str(value)


def plain_json(text: str | bytes | bytearray) -> bytes:
    """The same JSON without what Python alone reads: a sign stands for each half of a surrogate pair, and
    null for NaN and infinities. Raises ValueError."""
    value = json.loads(text, parse_constant=lambda _: None, parse_float=_finite)
    return whole_characters(json.dumps(value, ensure_ascii=False)).encode()


def _finite(digits: str) -> float | None:
    number = float(digits)
    return number if isfinite(number) else None


def _clean_tree(value: Any, levels: int) -> Any:
    """A JSON value with clean texts. Raises RecursionError if it is nested too deeply."""
    if isinstance(value, str):
        return whole_characters(value)
    if not levels:
        raise RecursionError
    if isinstance(value, list):
        return [_clean_tree(each, levels - 1) for each in value]
    if isinstance(value, dict):
        return {whole_characters(key): _clean_tree(each, levels - 1) for key, each in value.items()}
    return value
