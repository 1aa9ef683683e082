"""Calls with bare keys and strings between markers: `call:f{k:<|"|>v<|"|>,n:42}`, as Gemma writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from server.answers.calls import MAX_NAME, Calls
from server.answers.source import SPACE, Literals, Reading
from server.answers.writing.arguments import Member, in_order, members_of, raw_string
from server.answers.writing.values import write_value
from server.grammars.tool_grammar import Lark, ToolForm

CALL = "call:"
"""What stands between the opener and the name."""
_MOST_DEPTH = 32
COMMA = '","'
_SCALAR_ENDS = Literals([",", "}", "]"])


@dataclass(frozen=True, slots=True)
class BareKeys:
    quote: str
    """The marker at both ends of a string."""
    closes: tuple[str, ...]
    """What ends a call."""

    def holds_several(self, opener: str) -> bool:
        return False

    def write(self, lark: Lark, tools: Sequence[ToolForm], opener: str, several: bool) -> str:
        calls = (
            lark.sequence(lark.literal(CALL + tool.name), self._write_arguments(lark, tool)) for tool in tools
        )
        return lark.sequence(lark.one_of(calls), lark.literal(self.closes[0]))

    def _write_arguments(self, lark: Lark, tool: ToolForm) -> str:
        members = members_of(lark, tool, tool.schema)
        if members is None:
            return self._any_object(lark)
        written = [(each, write_value(self, lark, tool, each.schema, each.name)) for each in members]
        return self.write_object(lark, written, "")

    def write_string(self, lark: Lark, tool: ToolForm, schema: object, name: str) -> str:
        return lark.sequence(lark.literal(self.quote), raw_string(lark, tool, schema, self.quote))

    def write_object(self, lark: Lark, members: list[tuple[Member, str]], name: str) -> str:
        pairs = (
            (lark.sequence(lark.literal(member.name + ":"), value), member.required)
            for member, value in members
        )
        return lark.sequence('"{"', in_order(lark, pairs, '","'), '"}"')

    def write_array(self, lark: Lark, item: str, name: str) -> str:
        return lark.sequence('"["', f"({lark.many(item, COMMA)})?", '"]"')

    def write_other(self, lark: Lark, json: str, name: str) -> str:
        return json

    def write_any(self, lark: Lark, name: str) -> str:
        string = lark.sequence(lark.literal(self.quote), lark.raw(self.quote))
        scalar = lark.json({"type": ["number", "boolean", "null"]})
        return lark.one_of((string, scalar, self._any_object(lark)))

    def _any_object(self, lark: Lark) -> str:
        """An object of strings, numbers and the like."""
        string = lark.sequence(lark.literal(self.quote), lark.raw(self.quote))
        value = lark.one_of((string, lark.json({"type": ["number", "boolean", "null"]})))
        pair = lark.sequence("/[A-Za-z_][A-Za-z0-9_]{0,63}:/", value)
        return lark.sequence('"{"', f"({lark.many(pair, COMMA)})?", '"}"')

    def read(self, calls: Calls, opener: str) -> Reading[None]:
        source = calls.source
        if not (yield from source.expect(CALL)):
            return
        found = yield from source.read_until(Literals(["{"]), MAX_NAME)
        if found is None or not calls.begin(found[0].strip(SPACE)):
            return
        source.give_back("{")
        if (yield from self._read_value(calls, 0)):
            calls.end()
            yield from source.expect(*self.closes)

    def _read_value(self, calls: Calls, depth: int) -> Reading[bool]:
        """Pass a value on as JSON; False if the answer ends in it, or it is too deep."""
        source = calls.source
        match (yield from source.expect(self.quote, "{", "[")):
            case "{":
                return depth < _MOST_DEPTH and (yield from self._read_members(calls, depth, "{", "}"))
            case "[":
                return depth < _MOST_DEPTH and (yield from self._read_members(calls, depth, "[", "]"))
            case None:
                return (yield from self._read_scalar(calls))
            case _:
                calls.argue('"')
                end = yield from source.pass_until(Literals([self.quote]), calls.argue_string, in_markup=True)
                calls.argue('"' if end else "")
                return end is not None

    def _read_members(self, calls: Calls, depth: int, opens: str, closes: str) -> Reading[bool]:
        """Pass the members of an object or the elements of a list on."""
        source = calls.source
        calls.argue(opens)
        count = 0
        while not (yield from source.expect(closes)):
            if source.ended and not source.text.strip():
                return False
            if count:
                yield from source.expect(",")
                calls.argue(", ")
            count += 1
            if opens == "{":
                key = yield from source.read_until(Literals([":"]), MAX_NAME)
                if key is None:
                    return False
                calls.argue(json.dumps(key[0].strip(SPACE).replace(self.quote, "")) + ": ")
            if not (yield from self._read_value(calls, depth + 1)):
                return False
        calls.argue(closes)
        return True

    def _read_scalar(self, calls: Calls) -> Reading[bool]:
        found = yield from calls.source.read_until(_SCALAR_ENDS, MAX_NAME)
        if found is None:
            return False
        calls.source.give_back(found[1])
        text = found[0].strip(SPACE)
        try:
            calls.argue(json.dumps(json.loads(text)))
        except (ValueError, RecursionError):
            calls.argue(json.dumps(text, ensure_ascii=False))
        return bool(text)
