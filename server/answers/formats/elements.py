"""Calls whose arguments are elements named after themselves: `<invoke name="f"><city>Paris</city></invoke>`.

Objects are elements in elements, and lists are elements named `item`. Every tag has a mark before it, so that
a string may hold tags of its own. The tool's schema tells strings from other values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from server.answers.calls import MAX_NAME, MAX_VALUE, Calls
from server.answers.formats.schema_types import child_of, takes_strings_only, typed_value, types_in
from server.answers.source import SPACE as SPACES
from server.answers.source import Literals, Reading
from server.answers.writing.arguments import Member, in_order, members_of, raw_string
from server.answers.writing.values import write_value
from server.grammars.tool_grammar import SPACE, Lark, ToolForm

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

    def write(self, lark: Lark, tools: Sequence[ToolForm], opener: str, several: bool) -> str:
        one = lark.one_of(self._write_one(lark, tool) for tool in tools)
        if several:
            one = lark.many(one, SPACE)
        return lark.sequence(SPACE, one, SPACE, lark.literal(self.closes))

    def _write_one(self, lark: Lark, tool: ToolForm) -> str:
        name = lark.literal(self.name_opens + tool.name + self.name_ends)
        members = members_of(lark, tool, tool.schema)
        if members is None:
            return lark.sequence(name, lark.raw(self.ends))
        written = [(each, write_value(self, lark, tool, each.schema, each.name)) for each in members]
        return lark.sequence(name, self._write_members(lark, written), SPACE, lark.literal(self.ends))

    def _write_members(self, lark: Lark, members: list[tuple[Member, str]]) -> str:
        elements = (
            (lark.sequence(SPACE, lark.literal(f"{self.mark}<{member.name}>"), value), member.required)
            for member, value in members
        )
        return in_order(lark, elements, "")

    def write_string(self, lark: Lark, tool: ToolForm, schema: object, name: str) -> str:
        return lark.sequence(raw_string(lark, tool, schema, self.mark), lark.literal(f"</{name}>"))

    def write_object(self, lark: Lark, members: list[tuple[Member, str]], name: str) -> str:
        return lark.sequence(self._write_members(lark, members), SPACE, lark.literal(self._end_of(name)))

    def write_array(self, lark: Lark, item: str, name: str) -> str:
        one = lark.sequence(SPACE, lark.literal(f"{self.mark}<{ITEM}>"), item)
        return lark.sequence(f"({one})*", SPACE, lark.literal(self._end_of(name)))

    def write_other(self, lark: Lark, json: str, name: str) -> str:
        return lark.sequence(json, lark.literal(self._end_of(name)))

    def write_any(self, lark: Lark, name: str) -> str:
        return lark.sequence(lark.raw(self.mark), lark.literal(f"</{name}>"))

    def read(self, calls: Calls, opener: str) -> Reading[None]:
        source = calls.source
        while (yield from self._read_one(calls)):
            source.remember()
            if (yield from source.expect(self.name_opens, self.closes)) != self.name_opens:
                break
            source.give_back(self.name_opens)

    def _read_one(self, calls: Calls) -> Reading[bool]:
        source = calls.source
        if not (yield from source.expect(self.name_opens)):
            return False
        found = yield from source.read_until(Literals((self.name_ends,)), MAX_NAME)
        if found is None or not calls.begin(found[0].strip(SPACES)):
            return False
        calls.argue("{")
        count = 0
        while (taken := (yield from source.expect(self.ends, self.mark + "<"))) == self.mark + "<":
            calls.argue(", " if count else "")
            count += 1
            if not (yield from self._read_argument(calls)):
                return False
        if taken is None:
            return False
        calls.argue("}")
        calls.end()
        return True

    def _read_argument(self, calls: Calls) -> Reading[bool]:
        """Read an element of the call and pass it on; False if the answer ends in it."""
        found = yield from calls.source.read_until(Literals((">",)), MAX_NAME)
        if found is None:
            return False
        name = found[0].strip(SPACES)
        calls.argue(json.dumps(name, ensure_ascii=False) + ": ")
        if takes_strings_only(calls.schema, name):
            calls.argue('"')
            ends = Literals((self._end_of(name),))
            end = yield from calls.source.pass_until(ends, calls.argue_string, in_markup=True)
            calls.argue('"' if end else "")
            return end is not None
        value = yield from self._read_value(calls, name, child_of(calls.schema, name, calls.schema), 0)
        if value is not None:
            calls.argue(json.dumps(value[0], ensure_ascii=False))
        return value is not None

    def _read_value(
        self, calls: Calls, name: str, described: object, depth: int
    ) -> Reading[tuple[Any] | None]:
        """Take what an element holds, and its end; None if the answer ends in it, or it is too deep."""
        source, end, begin = calls.source, self._end_of(name), self.mark + "<"
        types = types_in(described, calls.schema)
        found = None if types == {"string"} else (yield from source.expect(end, begin))
        if found is None:
            read = yield from source.read_until(Literals((end,)), MAX_VALUE)
            if read is None:
                return None
            text = calls.as_written(read[0])
            return (text if types == {"string"} else typed_value(described, calls.schema, text),)
        children: list[tuple[str, Any]] = []
        while found == begin:
            child = yield from source.read_until(Literals((">",)), MAX_NAME)
            if child is None or depth == _MOST_DEPTH:
                return None
            key = child[0].strip(SPACES)
            value = yield from self._read_value(calls, key, child_of(described, key, calls.schema), depth + 1)
            if value is None:
                return None
            children.append((key, value[0]))
            found = yield from source.expect(end, begin)
        if found is None:
            return None
        if not children and "string" in types:
            return ("",)
        is_list = all(key == ITEM for key, _ in children) if children else "array" in types
        return ([value for _, value in children] if is_list and "object" not in types else dict(children),)

    def _end_of(self, name: str) -> str:
        return f"{self.mark}</{name}>"
