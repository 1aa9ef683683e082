"""The grammar of an answer behind the reasoning that comes before it: a schema binds the answer alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from server.grammars import lark
from server.grammars.building import Built

_SPACE = "space: /[ \\n\\r\\t]{1,20}/"


@dataclass(frozen=True, slots=True)
class Markers:
    """How a model marks its reasoning. Characters of `tokens` stand for special tokens."""

    opens: Sequence[str]
    closes: Sequence[str]
    tokens: Mapping[str, int]
    is_open: bool
    """Whether the prompt has opened the reasoning; otherwise the model may."""
    then: str = ""
    """What stands behind the reasoning, before an answer and before calls."""
    answers: str = ""
    """What stands before an answer, and not before calls."""


def behind_thinking(built: Built, markers: Markers, calls: Built | None = None) -> Built:
    """A grammar of reasoning, as the model writes it, and then the answer that was built, or these calls."""
    rules = _Rules(markers.tokens)
    answer = f"{rules.literal(markers.answers)} @answer".lstrip()
    if calls is not None:
        answer = f"({answer} | @calls)"
    if markers.closes:
        inside = rules.until(markers.closes)
        openers = " | ".join(map(rules.literal, markers.opens))
        behind = f"{inside} space? {rules.literal(markers.then)}".rstrip()
        thought = behind if markers.is_open else f"(({openers}) {behind})?"
        answer = f"{thought} {answer}"
    text = "\n".join(["%llguidance {}", f"start: {answer}", _SPACE, *rules.found, ""])
    grammars = [{"name": "thinking", "lark_grammar": text}, *_named(built)]
    if calls is not None:
        grammars.append({"name": "calls", "lark_grammar": calls.text})
    return msgspec.structs.replace(built, kind="llguidance", text=json.dumps({"grammars": grammars}))


@dataclass(slots=True)
class _Rules:
    tokens: Mapping[str, int]
    found: list[str] = field(default_factory=list)

    def literal(self, text: str) -> str:
        pieces = self._pieces(text)
        return " ".join(
            lark.token(self.tokens[one]) if one in self.tokens else lark.quoted(one) for one in pieces
        )

    def until(self, ends: Sequence[str]) -> str:
        """Any text up to the first of these, which is part of it."""
        firsts = [self._pieces(end)[0] for end in ends]
        self.found.append(f"TEXT: {lark.text_without([one for one in firsts if one not in self.tokens])}")
        ways: list[str] = []
        for end, first in zip(ends, firsts, strict=True):
            rest = self.literal(end.removeprefix(first)) if end != first else ""
            if first in self.tokens:
                ways.append(f"TEXT {lark.token(self.tokens[first])} {rest}")
            else:
                # One terminal, because the lexer does not go back to find where the text has ended.
                self.found.append(f"UNTIL{len(ways)}: TEXT {lark.quoted(first)}")
                ways.append(f"UNTIL{len(ways)} {rest}")
        return f"({' | '.join(ways)})"

    def _pieces(self, text: str) -> list[str]:
        if not self.tokens:
            return [text] if text else []
        marks = f"([{''.join(map(re.escape, self.tokens))}])"
        return [piece for piece in re.split(marks, text) if piece]


def _named(built: Built) -> list[dict[str, Any]]:
    """The grammars that were built, the first of them under the name `answer`."""
    match built.kind:
        case "json":
            return [{"name": "answer", "json_schema": json.loads(built.text)}]
        case "regex":
            return [{"name": "answer", "lark_grammar": f"start: {lark.regex(built.text)}"}]
        case "lark":
            return [{"name": "answer", "lark_grammar": built.text}]
        case "llguidance":
            first, *others = json.loads(built.text)["grammars"]
            return [{**first, "name": "answer"}, *others]
