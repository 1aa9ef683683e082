"""Calls of which all values are written in a way of their own, those within others too.

Gemma writes bare keys and strings between markers: `call:f{k:<|"|>v<|"|>,n:42}`. MiniMax writes elements that
are named after arguments: `<invoke name="f"><city>Paris</city></invoke>`. Objects are elements in elements,
lists elements named `item`. Every tag has a mark before it, so that a string may hold tags of its own. The
tool's schema tells strings from other values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from server.output_parsing.formats import arguments
from server.output_parsing.formats.call_format import (
    ANY_NAME,
    ANY_SPACE,
    MAX_NAME,
    CallGrammar,
    ParsedCalls,
    ToolForm,
)
from server.output_parsing.unread_text import MAX_VALUE, SPACE, Literals, Parse

CALL = "call:"
"""What stands between the opener and the name."""
_MOST_DEPTH = 32
COMMA = '","'
_SCALAR_ENDS = Literals([",", "}", "]"])


@dataclass(frozen=True, slots=True)
class BareKeys:
    """Keys stand in the order of the alphabet, in which templates show schemas and write calls."""

    quote: str
    """The marker at both ends of a string."""
    closes: tuple[str, ...]
    """What ends a call."""

    @property
    def closers(self) -> tuple[str, ...]:
        return self.closes

    def holds_several(self, opener: str) -> bool:
        return False

    def write(self, lark: CallGrammar, tools: Sequence[ToolForm], opener: str, several: bool) -> str:
        calls = (
            lark.sequence(lark.literal(CALL + tool.name), self._write_arguments(lark, tool)) for tool in tools
        )
        return lark.sequence(lark.one_of(calls), lark.literal(self.closes[0]))

    def _write_arguments(self, lark: CallGrammar, tool: ToolForm) -> str:
        members = arguments.write_members(self, lark, tool, tool.schema)
        return self._any_object(lark) if members is None else self.write_object(lark, members, "")

    def write_string(self, lark: CallGrammar, tool: ToolForm, schema: object, name: str) -> str:
        return lark.sequence(lark.literal(self.quote), arguments.raw_string(lark, tool, schema, self.quote))

    def write_object(self, lark: CallGrammar, members: list[tuple[arguments.Member, str]], name: str) -> str:
        pairs = (
            (lark.sequence(lark.literal(member.name + ":"), value), member.required)
            for member, value in sorted(members, key=lambda each: each[0].name.lower())
        )
        return lark.sequence('"{"', arguments.in_order(lark, pairs, COMMA), '"}"')

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
        call = None if opener == CALL else (yield from unread.expect(CALL, ":" + CALL))
        if call is None and opener != CALL:
            return
        if call != CALL:
            calls.repair(f"{call} behind the opener" if call else f"{CALL} without its opener")
        if not (yield from calls.read_name("{")):
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
                return (yield from calls.read_string(self.quote))

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
            calls.add_value(arguments.value_spelled(text))
        except ValueError:
            calls.add_value(text)
        return bool(text)


ITEM = "item"


@dataclass(frozen=True, slots=True)
class Elements:
    mark: str
    """What stands before every tag."""
    name_opens: str
    name_ends: str
    ends: str
    """What ends a call."""
    closes: str
    """What ends the section."""

    @property
    def closers(self) -> tuple[str, ...]:
        return self.ends, self.closes

    def holds_several(self, opener: str) -> bool:
        return True

    def write(self, lark: CallGrammar, tools: Sequence[ToolForm], opener: str, several: bool) -> str:
        one = lark.one_of(self._write_one(lark, tool) for tool in tools)
        if several:
            one = lark.many(one, ANY_SPACE)
        return lark.sequence(ANY_SPACE, one, ANY_SPACE, lark.literal(self.closes))

    def _write_one(self, lark: CallGrammar, tool: ToolForm) -> str:
        name = lark.literal(self.name_opens + tool.name + self.name_ends)
        members = arguments.write_members(self, lark, tool, tool.schema)
        if members is None:
            return lark.sequence(name, lark.raw(self.ends))
        return lark.sequence(name, self._write_members(lark, members), ANY_SPACE, lark.literal(self.ends))

    def _write_members(self, lark: CallGrammar, members: list[tuple[arguments.Member, str]]) -> str:
        elements = (
            (lark.sequence(ANY_SPACE, lark.literal(f"{self.mark}<{member.name}>"), value), member.required)
            for member, value in members
        )
        return arguments.in_order(lark, elements, "")

    def write_string(self, lark: CallGrammar, tool: ToolForm, schema: object, name: str) -> str:
        return lark.sequence(arguments.raw_string(lark, tool, schema, self.mark), lark.literal(f"</{name}>"))

    def write_object(self, lark: CallGrammar, members: list[tuple[arguments.Member, str]], name: str) -> str:
        return lark.sequence(self._write_members(lark, members), ANY_SPACE, lark.literal(self._end_of(name)))

    def write_array(self, lark: CallGrammar, item: str, name: str) -> str:
        one = lark.sequence(ANY_SPACE, lark.literal(f"{self.mark}<{ITEM}>"), item)
        return lark.sequence(f"({one})*", ANY_SPACE, lark.literal(self._end_of(name)))

    def write_other(self, lark: CallGrammar, json: str, name: str) -> str:
        return lark.sequence(json, lark.literal(self._end_of(name)))

    def write_any(self, lark: CallGrammar, name: str) -> str:
        return lark.sequence(lark.raw(self.mark), lark.literal(f"</{name}>"))

    def read(self, calls: ParsedCalls, opener: str) -> Parse[None]:
        if (yield from calls.unread.expect(self.name_opens)):
            yield from calls.read_all(self._read_one, (self.name_opens,), (self.closes,))

    def _read_one(self, calls: ParsedCalls) -> Parse[bool]:
        unread = calls.unread
        if not (yield from calls.read_name(self.name_ends)):
            return False
        calls.add_arguments("{")
        while (taken := (yield from unread.expect(self.ends, self.mark + "<"))) == self.mark + "<":
            if not (yield from self._read_argument(calls)):
                return False
        if taken is None:
            return False
        calls.end("}")
        return True

    def _read_argument(self, calls: ParsedCalls) -> Parse[bool]:
        """Read an element of the call and pass it on; False if the answer ends in it."""
        found = yield from calls.unread.read_until(Literals((">",)), MAX_NAME)
        if found is None:
            return False
        name = found[0].strip(SPACE)
        calls.add_key(name)
        described = arguments.child_of(calls.schema, name, calls.schema)
        if arguments.types_in(described, calls.schema) == {"string"}:
            return (yield from calls.read_string(self._end_of(name)))
        value = yield from self._read_value(calls, name, described, 0)
        if value is not None:
            calls.add_value(value[0])
        return value is not None

    def _read_value(
        self, calls: ParsedCalls, name: str, described: object, depth: int
    ) -> Parse[tuple[Any] | None]:
        """Take what an element holds, and its end; None if the answer ends in it, or it is too deep."""
        unread, end, begin = calls.unread, self._end_of(name), self.mark + "<"
        types = arguments.types_in(described, calls.schema)
        found = None if types == {"string"} else (yield from unread.expect(end, begin))
        if found is None:
            read = yield from unread.read_until(Literals((end,)), MAX_VALUE)
            if read is None:
                return None
            text = calls.as_written(read[0])
            return (text if types == {"string"} else arguments.typed_value(described, calls.schema, text),)
        children: dict[str, list[Any]] = {}
        while found == begin:
            child = yield from unread.read_until(Literals((">",)), MAX_NAME)
            if child is None or depth == _MOST_DEPTH:
                return None
            key = child[0].strip(SPACE)
            value = yield from self._read_value(
                calls, key, arguments.child_of(described, key, calls.schema), depth + 1
            )
            if value is None:
                return None
            children.setdefault(key, []).append(value[0])
            found = yield from unread.expect(end, begin)
        if found is None:
            return None
        if not children and "string" in types:
            return ("",)
        if "object" not in types and (set(children) == {ITEM} if children else "array" in types):
            return (children.get(ITEM, []),)
        return ({key: values if len(values) > 1 else values[0] for key, values in children.items()},)

    def _end_of(self, name: str) -> str:
        return f"{self.mark}</{name}>"
