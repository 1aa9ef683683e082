"""Builds grammars in llguidance's form of Lark: how a model of a dialect writes calls of given tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from server.text.detokenizer import FIRST_MARK, MOST_MARKS

Schema = Mapping[str, Any]

SPACE = "SPACE?"
"""Some space between tokens of markup, or none."""
ANY_OBJECT: Schema = {"type": "object"}
_WHITESPACE = r"[ \n\r\t]{0,20}"
"""The space between tokens of JSON, which is bounded so that no model spins in it."""
_MARKED = re.compile(f"([{chr(FIRST_MARK)}-{chr(FIRST_MARK + MOST_MARKS - 1)}])")
_NEEDS_ESCAPE = frozenset(r"\.+*?()|[]{}^$/#&-~")


class Unenforceable(Exception):
    """A tool's schema asks for something that no grammar of this dialect can hold a model to."""

    def __init__(self, keyword: str, tool: str = "") -> None:
        super().__init__(keyword)
        self.keyword = keyword
        self.tool = tool
        """The name of the tool; empty if it is not the schema of one."""


@dataclass(frozen=True, slots=True)
class ToolForm:
    """A tool, and what a call of it is held to."""

    name: str
    schema: Schema
    """The schema that arguments are held to; ANY_OBJECT leaves them free."""
    strict: bool = False
    """Whether what cannot be enforced is refused, and not left out."""


class Lark:
    """A grammar under way. Its methods return expressions, which may use the rules that they have added."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        """`tokens` are the special tokens for which marks stand in literals."""
        self.dropped: dict[str, None] = {}
        """What of the tools' schemas could not be enforced and is left out, as `tool: keyword`."""
        self._tokens = tokens
        self._rules: list[str] = []
        self._named: dict[str, str] = {}

    def text(self, start: str) -> str:
        """The whole grammar. `start` is the expression of the answer."""
        return "\n".join([f"start: {start}", *self._rules, r"SPACE: /[ \n]{1,8}/", ""])

    def rule(self, expression: str, *, terminal: bool = False) -> str:
        """The name of a rule for this expression, which is added unless it is there."""
        if (name := self._named.get(expression)) is None:
            name = self._named[expression] = f"{'T' if terminal else 'r'}{len(self._rules)}"
            self._rules.append(f"{name}: {expression}")
        return name

    def literal(self, text: str) -> str:
        """This very text. Marks in it are special tokens."""
        parts = [part for part in _MARKED.split(text) if part]
        return " ".join(
            f"<[{self._tokens[part]}]>" if _MARKED.match(part) else json.dumps(part, ensure_ascii=False)
            for part in parts
        )

    def one_of(self, expressions: Iterable[str]) -> str:
        distinct = list(dict.fromkeys(expressions))
        return distinct[0] if len(distinct) == 1 else self.rule(" | ".join(distinct))

    def sequence(self, *expressions: str) -> str:
        return self.rule(" ".join(each for each in expressions if each))

    def many(self, one: str, between: str) -> str:
        """One or more of these."""
        return f"{one} ({between} {one})*" if between else f"{one} ({one})*"

    def json(self, schema: Schema, *, strict: bool = False) -> str:
        """JSON of a schema."""
        options = {"whitespace_pattern": _WHITESPACE, **({} if strict else {"lenient": True})}
        return self.rule("%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=True))

    def raw(self, end: str, least: int = 0, most: int | None = None) -> str:
        """Text of any characters, so many at least and at most, and the literal that ends it."""
        count = "*" if not least and most is None else f"{{{least},{'' if most is None else most}}}"
        before, *marked = _MARKED.split(end, maxsplit=1)
        if marked:  # no text has a special token, so that this is the first
            text = f"/(?s:.{count}){_escaped(before)}/"
            return self.sequence(text, self.literal(end[len(before) :]))
        without = f"/(?s:.{count})/ & ~/(?s:.*){_escaped(end)}(?s:.*)/"
        return self.rule(f"({without}) {json.dumps(end, ensure_ascii=False)}", terminal=True)

    def without(self, literal: str) -> str:
        """Text of any characters in which a literal does not stand; may be empty."""
        if not literal or _MARKED.match(literal):
            return "/(?s:.*)/"
        return self.rule(f"/(?s:.*)/ & ~/(?s:.*){_escaped(literal)}(?s:.*)/", terminal=True)

    def drop(self, tool: ToolForm, keyword: str) -> None:
        """Note that a keyword is not enforced. Raises Unenforceable if it has to be."""
        if tool.strict:
            raise Unenforceable(keyword, tool.name)
        self.dropped[f"{tool.name}: {keyword}"] = None


def _escaped(text: str) -> str:
    """Text as a regular expression between slashes."""
    return "".join("\\n" if char == "\n" else "\\" + char if char in _NEEDS_ESCAPE else char for char in text)
