"""Reads the `response_template` of tokenizer_config.json, which says how a model writes answers.

transformers reads answers by it: fields for reasoning and calls, each with what opens and closes it and with
the form of its content. What maps to one of our ways to write calls is taken; of regular expressions those
that are literals around named groups. Of one that says more nothing is taken, and the chat template is asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from server.output_parsing.dialect import Dialect, ThinkingMarkers
from server.output_parsing.formats.call_format import CallFormat
from server.output_parsing.formats.json_calls import JsonObject, NamedJson
from server.output_parsing.formats.nested_values import CALL, BareKeys
from server.output_parsing.formats.tagged import Tagged
from server.output_parsing.tool_call_dialects import (
    DIALECTS,
    THINKING,
)

NAME = "response_template"
"""The name of a dialect, or of markers, that the checkpoint describes and no family in our tables has."""

_VERSION = 1
_REASONING = ("reasoning_content", "reasoning", "thinking")
_LONGEST = 500
"""The most characters of a regular expression that is looked at."""
_NAMED_GROUP = r"\(\?P<(?P<group>\w+)>(?:[^()\\\[\]]|\\.|\[(?:[^\]\\]|\\.)+\])*\)"
_PIECE = re.compile(
    rf"(?P<space>(?:\\s|\\n)[*+?]{{1,2}})|{_NAMED_GROUP}|(?P<line>\\n)|\\(?P<escaped>[^\w\s])"
    r"|(?P<plain>[^\\()\[\]{}.*+?|^$])"
)


class _Pattern(NamedTuple):
    """A regular expression of literals and named groups."""

    texts: list[list[str]]
    """The literals before, between and behind the groups, each cut where space may stand."""
    groups: list[str]

    @property
    def literals(self) -> list[str]:
        """The literals of an expression without groups."""
        return [text for text in self.texts[0] if text]


def described_calls(template: Mapping[str, Any]) -> Dialect | None:
    """How calls are written, if the template says it in a way that we know."""
    field = _field(template, ("tool_calls",))
    if field is None:
        return None
    opens, closes = _bounds(field, "open"), _bounds(field, "close")
    if opens is None or closes is None or not closes.literals or closes.groups:
        return None
    found = _calls(field, opens, closes)
    if found is None:
        return None
    known = (each for each in DIALECTS if each.format == found.format and found.opens[0] in each.opens)
    return next(known, found)


def described_thinking(template: Mapping[str, Any]) -> ThinkingMarkers | None:
    """The markers of reasoning, if the template names some."""
    field = _field(template, _REASONING)
    opens, closes = (_texts((field or {}).get(end)) for end in ("open", "close"))
    if not opens or not closes:
        return None
    known = (each for each in THINKING if {*opens} <= {*each.opens} and {*closes} <= {*each.closes})
    return next(known, ThinkingMarkers(NAME, opens, closes))


def _field(template: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any] | None:
    fields = template.get("fields")
    if template.get("version", _VERSION) != _VERSION or not isinstance(fields, Mapping):
        return None
    found = (fields.get(name) for name in names)
    return next((field for field in found if isinstance(field, Mapping)), None)


def _texts(value: object) -> tuple[str, ...]:
    """One literal or several."""
    listed = value if isinstance(value, list) else [value]
    return tuple(each for each in listed if isinstance(each, str) and each)


def _bounds(field: Mapping[str, Any], end: str) -> _Pattern | None:
    """What opens a field, or what closes it."""
    if literals := _texts(field.get(end)):
        return _Pattern([[literals[0]]], [])
    pattern = field.get(f"{end}_pattern")
    return _parsed(pattern) if isinstance(pattern, str) else None


def _parsed(pattern: str) -> _Pattern | None:
    """An expression of literals and named groups; None if it is more than that."""
    texts, groups, at = [[""]], list[str](), 0
    while at < min(len(pattern), _LONGEST):
        piece = _PIECE.match(pattern, at)
        if piece is None:
            return None
        at = piece.end()
        if piece["space"]:
            texts[-1].append("")
        elif piece["group"]:
            groups.append(piece["group"])
            texts.append([""])
        else:
            texts[-1][-1] += "\n" if piece["line"] else piece["escaped"] or piece["plain"]
    return _Pattern(texts, groups) if at == len(pattern) else None


def _calls(field: Mapping[str, Any], opens: _Pattern, closes: _Pattern) -> Dialect | None:
    arguments = field.get("content_args")
    arguments = arguments if isinstance(arguments, Mapping) else {}
    ends = tuple(closes.literals)
    before = [text for text in opens.texts[0] if text]
    match field.get("content"), opens.groups:
        case "json", []:
            array = field.get("transform_each") is True
            return _dialect(before, JsonObject(closes=ends, array=array)) if len(ends) == 1 else None
        case "json", ["name"]:
            return _named(before, "".join(opens.texts[1]), ends, arguments)
        case "xml-inline", ["name"]:
            return _tagged(before, "".join(opens.texts[1]), ends, arguments.get("tag_pattern"))
        case _:
            return None


def _dialect(opens: list[str], format: CallFormat) -> Dialect | None:
    return Dialect(NAME, (opens[0],), format) if len(opens) == 1 else None


def _named(
    before: list[str], behind: str, ends: tuple[str, ...], arguments: Mapping[str, Any]
) -> Dialect | None:
    """Arguments as JSON behind a name, or with keys and strings in a way of their own."""
    match arguments:
        case {"unquoted_keys": True, "string_delims": [[str(quote), str(other)]]} if quote == other:
            opener = "".join(before)
            if not opener.endswith(CALL) or behind:
                return None
            return _dialect([opener.removesuffix(CALL)], BareKeys(quote, ends))
        case {} if not arguments and len(ends) == 1:
            return _dialect(before, NamedJson(name_ends=(behind,) if behind else (), ends=ends))
        case _:
            return None


def _tagged(before: list[str], behind: str, ends: tuple[str, ...], tags: object) -> Dialect | None:
    """Arguments as elements with a key each."""
    pattern = _parsed(tags) if isinstance(tags, str) else None
    if pattern is None or pattern.groups != ["key", "value"] or not 1 <= len(before) <= 2 or not behind:
        return None
    key_opens, key_ends, value_ends = ("".join(texts) for texts in pattern.texts)
    format = Tagged(
        name_opens=before[1] if len(before) == 2 else "",
        name_ends=(behind,),
        key_opens=key_opens,
        key_ends=key_ends,
        value_ends=value_ends,
        ends=ends[:1],
        closes=ends[1:],
        trims=len(pattern.texts[1]) > 1 or len(pattern.texts[2]) > 1,
    )
    return _dialect(before[:1], format) if key_opens and key_ends and value_ends else None
