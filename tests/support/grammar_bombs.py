"""Grammars of a few kilobytes that would take seconds to minutes to follow, behind one token or many."""

from __future__ import annotations

from typing import Any

Body = dict[str, Any]


def _alike(count: int, rule: str = "s s") -> str:
    return " | ".join([rule] * count + ['"a"'])


def _in_pairs(count: int) -> str:
    """Rules of which each may be any two of the others."""
    names = [f"r{number}" for number in range(count)]
    pairs = {one: " | ".join(f"{other} {other}" for other in names if other != one) for one in names}
    return "start: r0\n" + "\n".join(f'{one}: {choices} | "a"' for one, choices in pairs.items())


def _arrays(count: int) -> Body:
    """A value that is an array of such values, in many ways."""
    again = {"type": "array", "items": {"$ref": "#/$defs/a"}}
    return {"$defs": {"a": {"anyOf": [again] * count + [{"type": "integer"}]}}, "$ref": "#/$defs/a"}


def _differing_arrays(count: int) -> Body:
    again = [
        {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": n % 7, "maxItems": 20 + n}
        for n in range(count)
    ]
    return {"$defs": {"a": {"anyOf": [*again, {"type": "integer"}]}}, "$ref": "#/$defs/a"}


def _behind(schema: Body, **fields: Body) -> Body:
    """The schema of a property behind others."""
    properties = {**fields, "v": {"$ref": schema["$ref"]}}
    return {"type": "object", "properties": properties, "required": [*properties], "$defs": schema["$defs"]}


def _pattern(number: int) -> Body:
    return {"type": "string", "pattern": f"^.*{chr(97 + number % 26)}.{{{50 + number}}}$"}


_WORD: Body = {"type": "string", "minLength": 3, "maxLength": 8}
_NUMBER = "(((([0-9]{1,50}){1,50}){1,50}){1,50})"
STRUCTURED: dict[str, Body] = {
    "Lark, at first": {"grammar": f"start: s\ns: {_alike(500)}"},
    "Lark, at second": {"grammar": f'start: "x" s\ns: {_alike(200)}'},
    "Lark, many": {"grammar": f'start: "x" s\ns: {_alike(8000)}'},
    "Lark, later": {"grammar": f'start: /[a-z]{{4}}/ "x" s\ns: {_alike(500)}'},
    "Lark, three": {"grammar": f"start: s\ns: {_alike(300, 's s s')}"},
    "Lark, in pairs": {"grammar": _in_pairs(60)},
    "EBNF": {"grammar": f'root ::= "x" s\ns ::= {_alike(400)}'},
    "regex, nested": {"regex": _NUMBER},
    "regex, words": {"regex": r"(\w{1,500}\s?){1,500}"},
    "regex, sets": {"regex": "(" + "|".join(f".*{chr(97 + n % 26)}.{{{n}}}" for n in range(99)) + "){1,90}"},
    "schema, at first": {"json": _arrays(400)},
    "schema, differing": {"json": _differing_arrays(400)},
    "schema, later": {"json": _behind(_arrays(400), name=_WORD, other=_WORD)},
    "schema, patterns": {"json": {"anyOf": [_pattern(n) for n in range(100)]}},
    "tag, schema": {
        "structural_tag": {
            "format": {
                "type": "tag",
                "begin": "<f>",
                "content": {"type": "json_schema", "json_schema": _arrays(400)},
                "end": "</f>",
            }
        }
    },
    "tag, grammar": {
        "structural_tag": {"format": {"type": "grammar", "grammar": f'start: "x" s\ns: {_alike(1000)}'}}
    },
    "tag, regex": {"structural_tag": {"format": {"type": "regex", "pattern": _NUMBER}}},
}


def _formed(schema: Body) -> Body:
    return {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}


def _tool(schema: Body) -> Body:
    return {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}


def grammar_bombs() -> dict[str, tuple[str, Body]]:
    """Paths and bodies of requests, by name."""
    asked: Body = {"max_tokens": 40, "temperature": 1, "seed": 1}
    message: Body = {**asked, "messages": [{"role": "user", "content": "hi"}]}
    found = {
        name: ("/v1/completions", {**asked, "prompt": "a", "structured_outputs": form})
        for name, form in STRUCTURED.items()
    }
    found["response_format"] = "/v1/chat/completions", {**message, "response_format": _formed(_arrays(400))}
    called = {"tool_choice": "required"}
    tools = [_tool(_behind(_arrays(60), name=_WORD))]
    found["tools, schema"] = "/v1/chat/completions", {**message, **called, "tools": tools}
    pattern = {"anyOf": [_pattern(n) for n in range(20)]}
    tools = [_tool({"type": "object", "properties": {"n": pattern}, "required": ["n"]})]
    found["tools, patterns"] = "/v1/chat/completions", {**message, **called, "tools": tools}
    return found
