"""The field `tool_choice`; and custom tools, whose input is free text.

A model calls a custom tool as a function with one string, `input`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Literal, cast

import msgspec

from server.errors import BadRequest
from server.grammars.lark_to_regex import NotRegular, regex_of

INPUT = "input"
UNENFORCED = "grammars told to the model but not enforced"
"""What a client is told of the names of some custom tools."""
MOST_NAMED = 16
"""The most names that one warning has."""
_SYNTAXES = ("lark", "regex")


def function_of(tool: object) -> object:
    """A tool of the type custom as a function; any other as it is."""
    if not isinstance(tool, Mapping) or tool.get("type") != "custom":
        return tool
    return as_function(tool.get("custom"))


def as_function(custom: object) -> dict[str, Any]:
    """What `custom` describes, as a function that the model knows, and what the server has to know of it."""
    if not isinstance(custom, Mapping):
        raise BadRequest("A tool of the type custom should have an object `custom`.", "tools")
    function: dict[str, Any] = {"name": custom.get("name"), "parameters": _parameters(custom.get("format"))}
    if custom.get("description") is not None:
        function["description"] = custom["description"]
    held_to, is_told = _held_to(custom)
    return {
        "type": "function",
        "function": function,
        "is_custom": True,
        "is_told": is_told,
        "held_to": held_to,
    }


def held_schema(parameters: dict[str, Any], pattern: str | None) -> dict[str, Any]:
    """The schema of a custom tool's argument, whose input matches this pattern if there is one."""
    if pattern is None:
        return parameters
    text = {**parameters["properties"][INPUT], "pattern": pattern}
    return {**parameters, "properties": {INPUT: text}}


def call_of(call: object) -> object:
    """An earlier call of a custom tool as a call of its function; any other as it is."""
    if not isinstance(call, Mapping) or call.get("type") != "custom":
        return call
    custom = call.get("custom")
    custom = custom if isinstance(custom, Mapping) else {}
    arguments = json.dumps({INPUT: custom.get(INPUT, "")}, ensure_ascii=False)
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": custom.get("name"), "arguments": arguments},
    }


def _held_to(custom: Mapping[str, Any]) -> tuple[str | None, bool]:
    """The pattern of the input, and whether there is a grammar that the model is told but not held to.

    The pattern is not part of the schema that the model sees, which has the grammar.
    """
    grammar = (custom.get("format") or {}).get("grammar")
    if grammar is None:
        return None, False
    try:
        definition = grammar["definition"]
        return _whole(definition if grammar["syntax"] == "regex" else regex_of(definition)), False
    except NotRegular:
        return None, True


def _whole(regex: str) -> str:
    return f"^(?:{regex})$"


def _parameters(form: object) -> dict[str, Any]:
    """The schema of the one argument, as the model sees it: grammars are told in its description."""
    text: dict[str, Any] = {"type": "string", "description": "The input as it is."}
    if form is not None and not isinstance(form, Mapping):
        raise BadRequest("The `format` of a custom tool should be an object.", "tools")
    if form is not None and form.get("type") == "grammar":
        grammar = form.get("grammar")
        syntax = grammar.get("syntax") if isinstance(grammar, Mapping) else None
        definition = grammar.get("definition") if isinstance(grammar, Mapping) else None
        if syntax not in _SYNTAXES or not isinstance(definition, str):
            raise BadRequest(
                "The grammar of a custom tool has a `syntax`, lark or regex, and a `definition`.", "tools"
            )
        text["description"] += f" It follows this {syntax} grammar:\n{definition}"
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}


Mode = Literal["none", "auto", "required"]


class ToolChoice(msgspec.Struct, frozen=True, gc=False):
    mode: Mode = "auto"
    names: tuple[str, ...] = ()
    """The tools that may be called; all, if none is named."""
    is_named: bool = False
    """Whether the answer is one call of the one tool."""

    def check(self, tools: Collection[str]) -> None:
        """Refuse a choice that cannot be made among these tools."""
        if not tools and (self.mode == "required" or self.names):
            raise BadRequest("When using `tool_choice`, `tools` must be set.", "tool_choice")
        if missing := [name for name in self.names if name not in tools]:
            raise BadRequest(
                f"tool_choice names {missing[0][:64]!r}, which is not one of `tools`.", "tool_choice"
            )

    def allows(self, name: str) -> bool:
        return self.mode != "none" and (not self.names or name in self.names)


def read_tool_choice(choice: object) -> ToolChoice:
    """What a client has sent, in OpenAI's form. Raises BadRequest, which says what there is."""
    match choice:
        case None:
            return ToolChoice()
        case "none" | "auto" | "required":
            return ToolChoice(cast("Mode", choice))
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)},
        }:
            names = [name for tool in tools if (name := _name_in(tool)) is not None]
            if len(names) < len(tools) or not names:
                raise BadRequest("Each of `allowed_tools` names a tool.", "tool_choice")
            return ToolChoice(cast("Mode", mode), tuple(names))
        case _ if (name := _name_in(choice)) is not None:
            return ToolChoice("required", (name,), is_named=True)
        case _:
            raise BadRequest(
                "tool_choice is one of none, auto, required, or names a tool, as in "
                '{"type": "function", "function": {"name": "..."}}, or several, as '
                '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}.',
                "tool_choice",
            )


def _name_in(tool: object) -> str | None:
    """The name in a tool that a choice refers to."""
    if not isinstance(tool, Mapping):
        return None
    described: Mapping[str, Any] = tool
    kind = described.get("type")
    if kind not in ("function", "custom"):
        return None
    inside = described.get(kind, described)
    name = inside.get("name") if isinstance(inside, Mapping) else None
    return name if isinstance(name, str) else None
