"""Calls whose arguments are elements named after themselves: `<invoke name="f"><city>Paris</city></invoke>`.

Objects are elements in elements, and lists are elements named `item`. Every tag has a mark before it, so that
a string may hold tags of its own. The tool's schema tells strings from other values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from server.answers.formats.arguments import (
    Member,
    child_of,
    in_order,
    raw_string,
    typed_value,
    types_in,
    write_members,
)
from server.answers.formats.call_format import MAX_NAME, SPACE, CallGrammar, ParsedCalls, ToolForm
from server.answers.unread_text import MAX_VALUE, Literals, Parse
from server.answers.unread_text import SPACE as SPACES

ITEM = "item"
_MOST_DEPTH = 32


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

    def holds_several(self, opener: str) -> bool:
        return True

    def write(self, lark: CallGrammar, tools: Sequence[ToolForm], opener: str, several: bool) -> str:
        one = lark.one_of(self._write_one(lark, tool) for tool in tools)
        if several:
            one = lark.many(one, SPACE)
        return lark.sequence(SPACE, one, SPACE, lark.literal(self.closes))

    def _write_one(self, lark: CallGrammar, tool: ToolForm) -> str:
        name = lark.literal(self.name_opens + tool.name + self.name_ends)
        members = write_members(self, lark, tool, tool.schema)
        if members is None:
            return lark.sequence(name, lark.raw(self.ends))
        return lark.sequence(name, self._write_members(lark, members), SPACE, lark.literal(self.ends))

    def _write_members(self, lark: CallGrammar, members: list[tuple[Member, str]]) -> str:
        elements = (
            (lark.sequence(SPACE, lark.literal(f"{self.mark}<{member.name}>"), value), member.required)
            for member, value in members
        )
        return in_order(lark, elements, "")

    def write_string(self, lark: CallGrammar, tool: ToolForm, schema: object, name: str) -> str:
        return lark.sequence(raw_string(lark, tool, schema, self.mark), lark.literal(f"</{name}>"))

    def write_object(self, lark: CallGrammar, members: list[tuple[Member, str]], name: str) -> str:
        return lark.sequence(self._write_members(lark, members), SPACE, lark.literal(self._end_of(name)))

    def write_array(self, lark: CallGrammar, item: str, name: str) -> str:
        one = lark.sequence(SPACE, lark.literal(f"{self.mark}<{ITEM}>"), item)
        return lark.sequence(f"({one})*", SPACE, lark.literal(self._end_of(name)))

    def write_other(self, lark: CallGrammar, json: str, name: str) -> str:
        return lark.sequence(json, lark.literal(self._end_of(name)))

    def write_any(self, lark: CallGrammar, name: str) -> str:
        return lark.sequence(lark.raw(self.mark), lark.literal(f"</{name}>"))

    def read(self, calls: ParsedCalls, opener: str) -> Parse[None]:
        unread = calls.unread
        while (yield from self._read_one(calls)):
            unread.remember()
            if (yield from unread.expect(self.name_opens, self.closes)) != self.name_opens:
                break
            unread.give_back(self.name_opens)

    def _read_one(self, calls: ParsedCalls) -> Parse[bool]:
        unread = calls.unread
        if not (yield from unread.expect(self.name_opens)):
            return False
        found = yield from unread.read_until(Literals((self.name_ends,)), MAX_NAME)
        if found is None or not calls.begin(found[0].strip(SPACES)):
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
        name = found[0].strip(SPACES)
        calls.add_key(name)
        described = child_of(calls.schema, name, calls.schema)
        if types_in(described, calls.schema) == {"string"}:
            calls.add_arguments('"')
            ends = Literals((self._end_of(name),))
            end = yield from calls.unread.pass_until(ends, calls.add_string, in_markup=True)
            calls.add_arguments('"' if end else "")
            return end is not None
        value = yield from self._read_value(calls, name, described, 0)
        if value is not None:
            calls.add_value(value[0])
        return value is not None

    def _read_value(
        self, calls: ParsedCalls, name: str, described: object, depth: int
    ) -> Parse[tuple[Any] | None]:
        """Take what an element holds, and its end; None if the answer ends in it, or it is too deep."""
        unread, end, begin = calls.unread, self._end_of(name), self.mark + "<"
        types = types_in(described, calls.schema)
        found = None if types == {"string"} else (yield from unread.expect(end, begin))
        if found is None:
            read = yield from unread.read_until(Literals((end,)), MAX_VALUE)
            if read is None:
                return None
            text = calls.as_written(read[0])
            return (text if types == {"string"} else typed_value(described, calls.schema, text),)
        children: list[tuple[str, Any]] = []
        while found == begin:
            child = yield from unread.read_until(Literals((">",)), MAX_NAME)
            if child is None or depth == _MOST_DEPTH:
                return None
            key = child[0].strip(SPACES)
            value = yield from self._read_value(calls, key, child_of(described, key, calls.schema), depth + 1)
            if value is None:
                return None
            children.append((key, value[0]))
            found = yield from unread.expect(end, begin)
        if found is None:
            return None
        if not children and "string" in types:
            return ("",)
        is_list = all(key == ITEM for key, _ in children) if children else "array" in types
        return ([value for _, value in children] if is_list and "object" not in types else dict(children),)

    def _end_of(self, name: str) -> str:
        return f"{self.mark}</{name}>"
