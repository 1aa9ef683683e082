"""Structural tags: texts of which parts between tags have forms of their own, as one grammar.

xgrammar has two ways to describe them in JSON. The older one is a list of tags and of the texts that trigger
them; the newer one is a format that is built of others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from server.errors import BadRequest
from server.grammars import lark
from server.grammars.grammar_limits import (
    DEEPEST_SCHEMA,
    MOST_REPEATS,
    check_grammar,
    check_regex,
    too_complex,
)
from server.grammars.lark import LarkGrammar

Format = dict[str, Any]

_REPEATED = {"optional": "?", "star": "*", "plus": "+"}


class TagGrammar:
    """Builds the grammars of one structural tag; the first begins the answer, and refers to the others."""

    def __init__(
        self, tokens: Mapping[str, int], json_schema: Callable[[object], dict[str, Any]], param: str
    ) -> None:
        """`tokens` are the ids of special tokens; `json_schema` prepares a schema."""
        self._tokens = tokens
        self._json_schema = json_schema
        self._param = param
        self._lark = LarkGrammar(tokens)
        self._grammars: list[dict[str, Any]] = []
        self._kinds: dict[str, Callable[[Format, int], str]] = {
            "const_string": lambda one, _: self._literal(self._text(one, "value")),
            "json_schema": self._json,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": lambda one, _: self._lark.text_without(self._texts(one, "excludes")),
            "sequence": self._sequence,
            "or": lambda one, depth: self._lark.one_of(self._all(one, "elements", depth)),
            "optional": self._repeat,
            "star": self._repeat,
            "plus": self._repeat,
            "repeat": self._repeat,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
            "token": lambda one, _: lark.token(self._token(one.get("token"))),
            "exclude_token": lambda one, _: lark.token_but([self._token(one.get("token"))]),
            "any_tokens": self._any_tokens,
            "token_triggered_tags": self._token_triggered,
        }

    def build(self, tag: Format) -> str:
        """The grammars as llguidance has them in JSON."""
        start = self._old(tag) if "structures" in tag else self._format(tag.get("format"), 1)
        first = {"name": "start", "lark_grammar": self._lark.text(start)}
        return json.dumps({"grammars": [first, *self._grammars]})

    def _old(self, tag: Format) -> str:
        tags = [
            {**one, "type": "tag", "content": {"type": "json_schema", "json_schema": one.get("schema")}}
            for one in self._list(tag, "structures")
            if isinstance(one, dict)
        ]
        return self._triggered({"tags": tags, "triggers": tag.get("triggers")}, 1)

    def _format(self, one: object, depth: int) -> str:
        if not isinstance(one, dict):
            raise self._wrong("each format is an object with a `type`")
        if depth > DEEPEST_SCHEMA:
            raise too_complex(f"A structural tag may be nested {DEEPEST_SCHEMA} deep at most.", self._param)
        make = self._kinds.get(str(one.get("type")))
        if make is None:
            known = ", ".join(self._kinds)
            raise self._wrong(f"there is no support for the type {one.get('type')!r:.60}, but for {known}")
        return make(cast("Format", one), depth)

    # Formats that hold no others.

    def _json(self, one: Format, depth: int) -> str:
        if one.get("style", "json") != "json":
            raise self._wrong(f"`style` of json_schema can be json only, not {one['style']!r:.60}")
        return self._lark.json(self._json_schema(one.get("json_schema")))

    def _regex(self, one: Format, depth: int) -> str:
        pattern = self._text(one, "pattern")
        check_regex(pattern, self._param)
        return self._lark.rule(lark.regex(pattern))

    def _grammar(self, one: Format, depth: int) -> str:
        text = self._text(one, "grammar")
        check_grammar(text, self._param)
        name = f"grammar{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": lark.from_grammar(text, self._param)})
        return f"@{name}"

    def _any_tokens(self, one: Format, depth: int) -> str:
        excluded = [self._token(each) for each in one.get("exclude_tokens") or []]
        return f"{lark.token_but(excluded)}*"

    # Formats that hold others.

    def _sequence(self, one: Format, depth: int) -> str:
        elements = self._list(one, "elements")
        found: list[str] = []
        before = ""
        """The terminal of free text that the next element ends."""
        for index, element in enumerate(elements):
            is_free = isinstance(element, dict) and element.get("type") == "any_text"
            if is_free and index + 1 < len(elements):
                begin = self._begin_of(elements[index + 1])
                excluded = self._texts(cast("Format", element), "excludes")
                before = self._lark.text_without([*excluded, begin])
            elif before:
                found.append(self._element_behind(before, cast("Format", element), depth + 1))
                before = ""
            else:
                found.append(self._format(element, depth + 1))
        return " ".join(found)

    def _element_behind(self, text: str, one: Format, depth: int) -> str:
        """A tag or a const_string with the free text before it."""
        head = self._lark.until(text, self._begin_of(one))
        if one["type"] == "const_string":
            return head
        return f"{head} {self._tag(one, depth, one['begin'])}"

    def _begin_of(self, following: object) -> str:
        """The text with which an element begins that ends the free text before it."""
        begin = None
        if isinstance(following, dict):
            name = {"tag": "begin", "const_string": "value"}.get(str(following.get("type")), "")
            begin = following.get(name)
        if not isinstance(begin, str) or not begin:
            raise self._wrong("any_text in a sequence is followed by a tag or a const_string, which ends it")
        return begin

    def _repeat(self, one: Format, depth: int) -> str:
        content = self._format(one.get("content"), depth + 1)
        if sign := _REPEATED.get(one["type"]):
            return f"({content}){sign}"
        least, most = one.get("min", 0), one.get("max", -1)
        if not isinstance(least, int) or not isinstance(most, int) or max(least, most) > MOST_REPEATS:
            raise self._wrong(f"`min` and `max` of repeat are numbers of at most {MOST_REPEATS}")
        return f"({content}){{{least},{'' if most < 0 else most}}}"

    def _tag(self, one: Format, depth: int, behind: str = "") -> str:
        """A tag; of its beginning, what comes behind a trigger that has been written."""
        begin = self._text(one, "begin").removeprefix(behind)
        content, ends = one.get("content"), one.get("end", "")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or not all(isinstance(end, str) for end in ends):
            raise self._wrong("`end` of a tag is a text, or a list of texts")
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends):
            text = self._lark.text_without([*self._texts(cast("Format", content), "excludes"), *ends])
            return f"{self._literal(begin)} {self._lark.one_of(self._lark.until(text, end) for end in ends)}"
        closed = self._lark.one_of(map(self._literal, ends))
        return f"{self._literal(begin)} {self._format(content, depth + 1)} {closed}"

    def _triggered(self, one: Format, depth: int) -> str:
        triggers, tags = self._texts(one, "triggers"), self._list(one, "tags")
        if not triggers or "" in triggers:
            raise self._wrong("`triggers` are the texts at which tags begin, at least one")
        text = self._lark.text_without([*self._texts(one, "excludes"), *triggers])
        found: list[str] = []
        for tag in tags:
            begin = str(tag.get("begin")) if isinstance(tag, dict) else ""
            matching = [trigger for trigger in triggers if begin.startswith(trigger)]
            if not matching:
                raise self._wrong("`begin` of each tag begins with one of the triggers")
            behind = max(matching, key=len)
            rest = self._tag(cast("Format", tag), depth, behind)
            found.append(f"{self._lark.until(text, behind)} {rest}")
        return self._with_text(one, found, text)

    def _token_triggered(self, one: Format, depth: int) -> str:
        triggers = [self._token(each) for each in self._list(one, "trigger_tokens")]
        text = f"{lark.token_but([*triggers, *map(self._token, one.get('exclude_tokens') or [])])}*"
        tags = [f"{text} {self._tag(tag, depth)}" for tag in self._list(one, "tags") if isinstance(tag, dict)]
        return self._with_text(one, tags, text)

    def _with_text(self, one: Format, tags: list[str], text: str) -> str:
        """Tags, each with the text before it, and the text behind the last of them."""
        tag = self._lark.rule(" | ".join(tags))
        if one.get("stop_after_first"):
            return tag if one.get("at_least_one") else f"({tag} | {text})"
        return f"{tag}{'+' if one.get('at_least_one') else '*'} {text}"

    def _separated(self, one: Format, depth: int) -> str:
        tag = self._lark.rule(" | ".join(self._all(one, "tags", depth)))
        if one.get("stop_after_first"):
            return tag if one.get("at_least_one") else f"{tag}?"
        several = f"({tag} ({self._literal(self._text(one, 'separator'))} {tag})*)"
        return several if one.get("at_least_one") else f"{several}?"

    # What formats are made of.

    def _all(self, one: Format, name: str, depth: int) -> list[str]:
        return [self._format(each, depth + 1) for each in self._list(one, name)]

    def _literal(self, text: str) -> str:
        return self._lark.literal(text) or '""'

    def _token(self, value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        if isinstance(value, str) and value in self._tokens:
            return self._tokens[value]
        raise self._wrong(f"{value!r:.60} is not a special token of this model")

    def _text(self, one: Format, name: str) -> str:
        value = one.get(name)
        if not isinstance(value, str):
            raise self._wrong(f"`{name}` of {one.get('type', 'a tag')} is a text")
        return value

    def _texts(self, one: Format, name: str) -> list[str]:
        values = one.get(name) or []
        if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
            raise self._wrong(f"`{name}` is a list of texts")
        return values

    def _list(self, one: Format, name: str) -> list[object]:
        values = one.get(name)
        if not isinstance(values, list) or not values:
            raise self._wrong(f"`{name}` is a list with at least one entry")
        return values

    def _wrong(self, why: str) -> BadRequest:
        return BadRequest(f"The structural tag cannot be used: {why}.", self._param)
