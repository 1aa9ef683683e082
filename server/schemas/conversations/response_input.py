"""The input items and the tools of POST /v1/responses, in the form in which chat completions has them.

A custom tool, whose input is free text, becomes a function with one string. Tools of a namespace get names of
their own. Items and tools of other types are left out, and the client is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.errors import BadRequest
from server.media.media_parts import read_part
from server.schemas.conversations.transcript import Content, Transcript, objects_of, shown, text_of, unsealed
from server.schemas.messages import INPUT, as_function
from server.schemas.repaired_history import TEXTS, as_text, named, text_in

ROLES = ("user", "assistant", "system", "developer")


class InputReader:
    """Reads items one after the other. What is wrong in those of a model and its tools is repaired later."""

    def __init__(self) -> None:
        self.transcript = Transcript("items")

    def read(self, item: Mapping[str, Any], where: str) -> None:
        """Read one item, which is `where` in the request."""
        id = item.get("call_id") or item.get("id")
        match kind_of(item):
            case "message":
                self._message(item, where)
            case "reasoning":
                self.transcript.think(_reasoning(item))
            case "function_call":
                self.transcript.call(id, _name(item), item.get("arguments"))
            case "custom_tool_call":
                self.transcript.call(id, _name(item), {INPUT: as_text(item.get(INPUT) or "")})
            case "local_shell_call":
                self.transcript.call(id, "local_shell", item.get("action"))
            case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
                self.transcript.answer(id, item.get("output"))
            case "item_reference":
                raise BadRequest(
                    f"{where}: an item_reference is not looked up. Send the item itself, as clients do with "
                    "`store: false`, or continue what is kept by `previous_response_id` or `conversation`.",
                    where,
                )
            case kind if item.get("role") in (None, "assistant") and (
                isinstance(kind, str) or "content" not in item
            ):
                self.transcript.leave_out(kind)
            case kind:
                raise BadRequest(
                    f"{where}: items are of the types message, reasoning, function_call, "
                    "function_call_output, custom_tool_call and custom_tool_call_output, got "
                    f"{shown(kind)}.",
                    f"{where}.type",
                )

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise BadRequest(
                f"{where}.role is one of {', '.join(ROLES)}, got {shown(role)}.", f"{where}.role"
            )
        content = item.get("content")
        self.transcript.say(role, content if role == "assistant" else _content(content, f"{where}.content"))


def _name(item: Mapping[str, Any]) -> object:
    name = item.get("name")
    return known_as(name, item.get("namespace")) if isinstance(name, str) else name


def kind_of(item: Mapping[str, Any]) -> object:
    """The type of an item; where that is no text, the one that its fields show."""
    if isinstance(kind := item.get("type"), str):
        return kind
    if "call_id" in item:
        return "function_call_output" if "output" in item else "function_call"
    if "summary" in item or "encrypted_content" in item:
        return "reasoning"
    return "message" if "role" in item else kind


def _content(value: object, where: str) -> Content:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadRequest(f"{where} should be a string or a list of parts.", where)
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(objects_of(value, where))]


def _part(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A part as chat completions has it."""
    if part.get("type") in ("input_image", "input_audio"):
        return read_part(part)
    return {"type": "text", "text": _part_text(part, where)}


def _part_text(part: Mapping[str, Any], where: str) -> str:
    kind = part.get("type")
    if kind not in TEXTS:
        raise BadRequest(
            f"{where}: parts of the type {shown(kind)} are not supported yet, only input_text, "
            "output_text, input_image and input_audio are.",
            f"{where}.type",
        )
    name = "refusal" if kind == "refusal" else "text"
    return text_of(part.get(name), f"{where}.{name}")


def _reasoning(item: Mapping[str, Any]) -> str:
    """The text of a reasoning item: what this server has sealed, else its content, else its summary."""
    kept = unsealed(item.get("encrypted_content"))
    return kept or text_in(item.get("content")) or text_in(item.get("summary"))


@dataclass(frozen=True, slots=True)
class CalledAs:
    """The name and namespace by which a client calls a tool that the model knows by one name."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass
class Tools:
    """The tools of a request."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    """Each tool as chat completions has it."""
    called: dict[str, CalledAs] = field(default_factory=dict)
    """The model's name of a tool, and the client's."""

    def client_name(self, name: str) -> CalledAs:
        """What the client calls the tool that the model knows by this name."""
        return self.called.get(name) or CalledAs(name)


def known_as(name: str, namespace: object) -> str:
    """The name by which the model knows the tool of a name and a namespace."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def read_tools(tools: Sequence[Mapping[str, Any]]) -> Tools:
    """Reads the field `tools`. Those of other types stay as they are, and are left out later."""
    found = Tools()
    for index, tool in enumerate(tools):
        _read_tool(found, tool, f"tools[{index}]", None)
    return found


def _read_tool(found: Tools, tool: Mapping[str, Any], where: str, namespace: str | None) -> None:
    kind = tool.get("type")
    if kind == "namespace" and namespace is None:
        inside = text_of(tool.get("name"), f"{where}.name")
        for index, each in enumerate(objects_of(tool.get("tools"), f"{where}.tools")):
            _read_tool(found, each, f"{where}.tools[{index}]", inside)
    elif kind in ("function", "custom"):
        _read_function(found, tool, where, namespace)
    elif isinstance(kind, str):
        found.functions.append({**tool})
    else:
        raise BadRequest(
            f"{where}: tools have the type function, custom or namespace, got {shown(kind)}.", where
        )


def _read_function(found: Tools, tool: Mapping[str, Any], where: str, namespace: str | None) -> None:
    name = text_of(tool.get("name"), f"{where}.name")
    known = known_as(name, namespace)
    if known in found.called:
        raise BadRequest(f"{where}: there is another tool with the name {known[:64]!r}.", f"{where}.name")
    is_custom = tool.get("type") == "custom"
    found.called[known] = CalledAs(name, namespace, is_custom)
    if is_custom:
        found.functions.append(_from_custom(tool, known, where))
        return
    given = {key: tool[key] for key in ("description", "parameters", "strict") if tool.get(key) is not None}
    found.functions.append({"type": "function", "function": {"name": known, **given}})


def _from_custom(tool: Mapping[str, Any], known: str, where: str) -> dict[str, Any]:
    """A custom tool as chat completions has it."""
    format = tool.get("format")
    if format is not None and not isinstance(format, dict):
        raise BadRequest(f"{where}.format should be an object.", f"{where}.format")
    custom: dict[str, Any] = {"name": known, "description": tool.get("description")}
    if format and format.get("type") == "grammar":
        grammar = {name: format.get(name) for name in ("syntax", "definition")}
        custom["format"] = {"type": "grammar", "grammar": grammar}
    return as_function(custom)


_CHOICES = ("function", "custom", "allowed_tools")
"""The types of choices that chat completions has."""


def read_tool_choice(choice: object) -> object:
    """The field `tool_choice` in the words of chat completions."""
    match choice:
        case {"type": "function" | "custom", "name": str(name), **rest}:
            return {"type": "function", "function": {"name": known_as(name, rest.get("namespace"))}}
        case {"type": "allowed_tools", "mode": mode, "tools": list(allowed)}:
            names = [read_tool_choice(each) for each in allowed if not _is_left_out(each)]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": names}}
        case {"type": str(kind)} if kind not in _CHOICES:
            raise BadRequest(
                f"tool_choice names a tool of the type {named(kind)}. This server runs no tools: it has "
                "those of the types function and custom, which clients run.",
                "tool_choice",
            )
        case _:
            return choice


def _is_left_out(tool: object) -> bool:
    return isinstance(tool, dict) and isinstance(kind := tool.get("type"), str) and kind not in _CHOICES
