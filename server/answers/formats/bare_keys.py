"""Calls with bare keys and strings between markers: `call:f{k:<|"|>v<|"|>,n:42}`, as Gemma writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from server.answers.formats.arguments import Member, in_order, raw_string, write_members
from server.answers.formats.call_format import ANY_NAME, MAX_NAME, CallGrammar, ParsedCalls, ToolForm
from server.answers.unread_text import SPACE, Literals, Parse

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

    def write(self, lark: CallGrammar, tools: Sequence[ToolForm], opener: str, several: bool) -> str:
        calls = (
            lark.sequence(lark.literal(CALL + tool.name), self._write_arguments(lark, tool)) for tool in tools
        )
        return lark.sequence(lark.one_of(calls), lark.literal(self.closes[0]))

    def _write_arguments(self, lark: CallGrammar, tool: ToolForm) -> str:
        members = write_members(self, lark, tool, tool.schema)
        return self._any_object(lark) if members is None else self.write_object(lark, members, "")

    def write_string(self, lark: CallGrammar, tool: ToolForm, schema: object, name: str) -> str:
        return lark.sequence(lark.literal(self.quote), raw_string(lark, tool, schema, self.quote))

    def write_object(self, lark: CallGrammar, members: list[tuple[Member, str]], name: str) -> str:
        pairs = (
            (lark.sequence(lark.literal(member.name + ":"), value), member.required)
            for member, value in members
        )
        return lark.sequence('"{"', in_order(lark, pairs, COMMA), '"}"')

    def write_array(self, lark: CallGrammar, item: str, name: str) -> str:
        return lark.sequence('"["', f"({lark.many(item, COMMA)})?", '"]"')

    def write_other(self, lark: CallGrammar, json: str, name: str) -> str:
        return json

    def write_any(self, lark: CallGrammar, name: str) -> str:
        return lark.one_of((self._any_scalar(lark), self._any_object(lark)))

    def _any_scalar(self, lark: CallGrammar) -> str:
        string = lark.sequence(lark.literal(self.quote), lark.raw(self.quote))
        return lark.one_of((string, lark.json_of({"type": ["number", "boolean", "null"]})))

    def _any_object(self, lark: CallGrammar) -> str:
        """An object of strings, numbers and the like."""
        pair = lark.sequence(f"/{ANY_NAME}:/", self._any_scalar(lark))
        return lark.sequence('"{"', f"({lark.many(pair, COMMA)})?", '"}"')

    def read(self, calls: ParsedCalls, opener: str) -> Parse[None]:
        unread = calls.unread
        if not (yield from unread.expect(CALL)):
            return
        found = yield from unread.read_until(Literals(["{"]), MAX_NAME)
        if found is None or not calls.begin(found[0].strip(SPACE)):
            return
        unread.give_back("{")
        if (yield from self._read_value(calls, 0)):
            calls.end()
            yield from unread.expect(*self.closes)

    def _read_value(self, calls: ParsedCalls, depth: int) -> Parse[bool]:
        """Pass a value on as JSON; False if the answer ends in it, or it is too deep."""
        unread = calls.unread
        match (yield from unread.expect(self.quote, "{", "[")):
            case "{":
                return depth < _MOST_DEPTH and (yield from self._read_members(calls, depth, "{", "}"))
            case "[":
                return depth < _MOST_DEPTH and (yield from self._read_members(calls, depth, "[", "]"))
            case None:
                return (yield from self._read_scalar(calls))
            case _:
                calls.add_arguments('"')
                end = yield from unread.pass_until(Literals([self.quote]), calls.add_string, in_markup=True)
                calls.add_arguments('"' if end else "")
                return end is not None

    def _read_members(self, calls: ParsedCalls, depth: int, opens: str, closes: str) -> Parse[bool]:
        """Pass the members of an object or the elements of a list on."""
        unread = calls.unread
        calls.add_arguments(opens)
        count = 0
        while not (yield from unread.expect(closes)):
            if unread.ended and not unread.text.strip():
                return False
            if count:
                yield from unread.expect(",")
                calls.add_arguments(", ")
            count += 1
            if opens == "{":
                key = yield from unread.read_until(Literals([":"]), MAX_NAME)
                if key is None:
                    return False
                calls.add_arguments(json.dumps(key[0].strip(SPACE).replace(self.quote, "")) + ": ")
            if not (yield from self._read_value(calls, depth + 1)):
                return False
        calls.add_arguments(closes)
        return True

    def _read_scalar(self, calls: ParsedCalls) -> Parse[bool]:
        found = yield from calls.unread.read_until(_SCALAR_ENDS, MAX_NAME)
        if found is None:
            return False
        calls.unread.give_back(found[1])
        text = found[0].strip(SPACE)
        try:
            calls.add_arguments(json.dumps(json.loads(text)))
        except (ValueError, RecursionError):
            calls.add_value(text)
        return bool(text)
