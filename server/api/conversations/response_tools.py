"""The tools of POST /v1/responses, in the form in which chat completions has them.

A custom tool, whose input is free text, becomes a function with one string. Tools of a namespace get names of
their own. Tools that OpenAI runs itself are left out, and the client is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.api.conversations.tools import as_function
from server.api.conversations.transcript import objects_of, text_of
from server.errors import BadRequest

HOSTED = frozenset(
    [
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    ]
)
"""Types of tools that OpenAI runs, or has taught to its own models."""

_RUN_BY_CLIENTS = (
    "This server runs no tools: it has those of the types function and custom, which clients run."
)


@dataclass(frozen=True, slots=True)
class CalledAs:
    """What a client calls a tool that the model knows by one name."""

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
    left_out: list[str] = field(default_factory=list)
    """The types of tools that were left out."""
    free: list[str] = field(default_factory=list)
    """Names of custom tools whose grammar the model is told, but not held to."""

    def known_as(self, name: str, namespace: object = None) -> str:
        """The name by which the model knows a tool."""
        return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name

    def client_name(self, name: str) -> CalledAs:
        """What the client calls the tool that the model knows by this name."""
        return self.called.get(name) or CalledAs(name)


def read_tools(tools: Sequence[Mapping[str, Any]]) -> Tools:
    """Reads the field `tools`. If all that is asked for is left out, it is refused instead."""
    found = Tools()
    for index, tool in enumerate(tools):
        _read_tool(found, tool, f"tools[{index}]", None)
    if found.left_out and not found.functions:
        raise BadRequest(
            f"Tools of the type {', '.join(found.left_out)} are not here. {_RUN_BY_CLIENTS}", "tools"
        )
    return found


def _read_tool(found: Tools, tool: Mapping[str, Any], where: str, namespace: str | None) -> None:
    kind = tool.get("type")
    if kind == "namespace" and namespace is None:
        inside = text_of(tool.get("name"), f"{where}.name")
        for index, each in enumerate(objects_of(tool.get("tools"), f"{where}.tools")):
            _read_tool(found, each, f"{where}.tools[{index}]", inside)
    elif kind in ("function", "custom"):
        _read_function(found, tool, where, namespace)
    elif kind in HOSTED:
        if kind not in found.left_out:
            found.left_out.append(kind)
    else:
        shown = repr(kind[:64]) if isinstance(kind, str) else "none"
        raise BadRequest(f"{where}: tools have the type function, custom or namespace, got {shown}.", where)


def _read_function(found: Tools, tool: Mapping[str, Any], where: str, namespace: str | None) -> None:
    name = text_of(tool.get("name"), f"{where}.name")
    known = found.known_as(name, namespace)
    if known in found.called:
        raise BadRequest(f"{where}: there is another tool with the name {known[:64]!r}.", f"{where}.name")
    is_custom = tool.get("type") == "custom"
    found.called[known] = CalledAs(name, namespace, is_custom)
    if is_custom:
        found.functions.append(_from_custom(tool, known, where))
        if found.functions[-1]["is_told"]:
            found.free.append(known)
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


def read_tool_choice(choice: object, tools: Tools) -> object:
    """The field `tool_choice` in the words of chat completions."""
    match choice:
        case {"type": "function" | "custom", "name": str(name), **rest}:
            return {"type": "function", "function": {"name": tools.known_as(name, rest.get("namespace"))}}
        case {"type": "allowed_tools", "mode": mode, "tools": list(allowed)}:
            named = [read_tool_choice(each, tools) for each in allowed if not _is_left_out(each, tools)]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        case {"type": str(kind)} if kind in HOSTED:
            raise BadRequest(f"tool_choice names a tool of the type {kind}. {_RUN_BY_CLIENTS}", "tool_choice")
        case _:
            return choice


def _is_left_out(tool: object, tools: Tools) -> bool:
    return isinstance(tool, dict) and tool.get("type") in tools.left_out
