"""Messages of Ollama's chats in the form of chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from server.api.conversations.transcript import objects_of, shown, text_of
from server.errors import BadRequest
from server.media.parts import is_reference

ROLES = ("system", "user", "assistant", "tool")

OpenCalls = dict[str, str]
"""The ids of calls that no tool has answered yet, with the names of their tools, in order."""


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All messages. Calls and what tools answer belong together by the tool's name and the order."""
    calls: OpenCalls = {}
    return [_message(message, f"messages[{index}]", calls) for index, message in enumerate(messages)]


def with_images(text: str, images: Sequence[str]) -> str | list[dict[str, Any]]:
    """The content of a message with files in base64, which come before its text."""
    if not images:
        return text
    urls = [data if is_reference(data) else f"data:image;base64,{data}" for data in images]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": url} for url in urls]
    return [*parts, {"type": "text", "text": text}]


def _message(message: Mapping[str, Any], where: str, calls: OpenCalls) -> dict[str, Any]:
    role, images = message.get("role"), message.get("images") or []
    if role not in ROLES:
        raise BadRequest(f"{where}.role is one of {', '.join(ROLES)}, got {shown(role)}.", where)
    if not isinstance(images, list) or not all(isinstance(data, str) for data in images):
        raise BadRequest(f"{where}.images should be a list of files in base64.", f"{where}.images")
    text = text_of(message.get("content") or "", f"{where}.content")
    said: dict[str, Any] = {"role": role, "content": with_images(text, images)}
    if thinking := message.get("thinking"):
        # Templates read one name or the other.
        said["reasoning_content"] = said["reasoning"] = text_of(thinking, f"{where}.thinking")
    if made := message.get("tool_calls"):
        place = f"{where}.tool_calls"
        asked = objects_of(made, place)
        said["tool_calls"] = [_call(call, f"{place}[{n}]", where, calls) for n, call in enumerate(asked)]
    if role == "tool":
        said |= _answered(message, calls)
    return said


def _call(call: Mapping[str, Any], place: str, where: str, calls: OpenCalls) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        raise BadRequest(
            f"{place}.function should be an object with a `name` and an object `arguments`.", place
        )
    id = call.get("id") or f"call_{where}_{len(calls)}"
    calls[text_of(id, f"{place}.id")] = name = text_of(function.get("name"), f"{place}.function.name")
    function = {"name": name, "arguments": function["arguments"]}
    return {"id": id, "type": "function", "function": function}


def _answered(message: Mapping[str, Any], calls: OpenCalls) -> dict[str, Any]:
    """Find the call that a message of a tool answers: the one that it names, or the first that is open."""
    name = message.get("tool_name") or message.get("name")
    named = (id for id, tool in calls.items() if tool == name or not name)
    id = message.get("tool_call_id") or next(named, None)
    tool = calls.pop(id, name) if isinstance(id, str) else name
    found = {"tool_call_id": id, "name": tool}
    return {field: value for field, value in found.items() if isinstance(value, str)}
