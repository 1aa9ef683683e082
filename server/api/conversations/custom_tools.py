"""Custom tools, whose input is free text: a model calls them as functions with one string, `input`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

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
