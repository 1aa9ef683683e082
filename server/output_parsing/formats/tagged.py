"""Calls with a tag for each argument: `<function=f><parameter=a>1</parameter></function>`.

Strings stand there as they are, other values as JSON; only the tool's schema tells which is which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from server.output_parsing.formats.arguments import (
    Member,
    child_of,
    in_order,
    is_string,
    json_argument,
    members_of,
    raw_string,
    takes_any_text,
    typed_value,
    types_in,
)
from server.output_parsing.formats.call_format import (
    ANY_NAME,
    ANY_SPACE,
    MAX_NAME,
    CallGrammar,
    ParsedCalls,
    ToolForm,
)
from server.output_parsing.unread_text import MAX_VALUE, SPACE, JsonSpan, Literals, Parse, UnreadText

_WRITTEN_AS_JSON = frozenset({"array", "object"})


@dataclass(frozen=True, slots=True)
class Tagged:
    name_opens: str
    """What stands before the name."""
    name_ends: tuple[str, ...]
    """What stands behind it. One that begins a key, or ends the call, is read as that too."""
    key_opens: str
    key_ends: str
    value_ends: str
    ends: tuple[str, ...]
    """What ends a call."""
    value_opens: str = ""
    """What stands between key and value, if anything does but `key_ends`."""
    trims: bool = False
    """Whether one newline at each side of a value belongs to the markup."""
    again: tuple[str, ...] = ()
    """What begins another call within the section."""
    closes: tuple[str, ...] = ()
    """What ends the section."""
    says_string: Mapping[str, bool] | None = None
    """Ends of keys that say whether the value is a string, in place of `key_ends`."""

    def holds_several(self, opener: str) -> bool:
        return bool(self.again)

    def write(self, lark: CallGrammar, tools: Sequence[ToolForm], opener: str, several: bool) -> str:
        one = lark.one_of(self._write_one(lark, tool) for tool in tools)
        if several and self.holds_several(opener):
            one = lark.many(one, ANY_SPACE)
        of_opener = [each for each in self.closes if each.endswith(opener.lstrip("<"))]
        closes = lark.behind_space(of_opener or self.closes)
        return lark.sequence(ANY_SPACE if self.name_opens else "", one, closes)

    def _write_one(self, lark: CallGrammar, tool: ToolForm) -> str:
        name_ends_itself = self.key_opens in self.name_ends
        name = self.name_opens + tool.name + ("" if name_ends_itself else self.name_ends[0])
        members = members_of(lark, tool, tool.schema)
        if members is None:
            key_end = lark.literal(self._key_end(is_string=True))
            key = lark.sequence(lark.literal(self.key_opens), f"/{ANY_NAME}/", key_end)
            value = self._write_value_opens(lark), lark.raw(self.value_ends)
            arguments = f"({lark.sequence(ANY_SPACE, key, *value)})*"
        else:
            arguments = in_order(lark, (self._write_argument(lark, tool, each) for each in members), "")
        return lark.sequence(lark.literal(name), arguments, ANY_SPACE, lark.literal(self.ends[0]))

    def _write_argument(self, lark: CallGrammar, tool: ToolForm, member: Member) -> tuple[str, bool]:
        as_string = is_string(tool, member.schema)
        key = lark.literal(self.key_opens + member.name + self._key_end(is_string=as_string))
        begin = self._write_value_opens(lark)
        newline = '"\\n"' if self.trims else ""
        if as_string:
            value = raw_string(lark, tool, member.schema, self.value_ends)
        else:
            end = newline, lark.literal(self.value_ends)
            free = lark.raw(self.value_ends) if takes_any_text(tool, member.schema) else ""
            value = free or lark.sequence(json_argument(lark, tool, member.schema), *end)
        return lark.sequence(ANY_SPACE, key, begin, newline, value), member.required

    def _write_value_opens(self, lark: CallGrammar) -> str:
        return lark.behind_space((self.value_opens,)) if self.value_opens else ""

    def _key_end(self, *, is_string: bool) -> str:
        if self.says_string is None:
            return self.key_ends
        return next(end for end, says in self.says_string.items() if says == is_string)

    def read(self, calls: ParsedCalls, opener: str) -> Parse[None]:
        unread = calls.unread
        while (yield from self._read_one(calls)):
            unread.remember()
            if not (yield from unread.expect(*self.again)):
                break
            if self.again[0] == self.name_opens:
                unread.give_back(self.name_opens)
        if calls.count:
            yield from unread.expect(*self.closes)

    def _read_one(self, calls: ParsedCalls) -> Parse[bool]:
        unread = calls.unread
        if self.name_opens and not (yield from unread.expect(self.name_opens)):
            return False
        if not (end := (yield from calls.read_name(*self.name_ends))):
            return False
        if end == self.key_opens or end in self.ends:
            unread.give_back(end)
        calls.add_arguments("{")
        while (taken := (yield from unread.expect(self.key_opens, *self.ends))) == self.key_opens:
            if not (yield from self._read_argument(calls)):
                return False
        if taken is None:  # pass over what should not be there, to the end of the call
            end = yield from unread.pass_until(Literals(self.ends), lambda _: None)
            if end is None:
                return False
        calls.end("}")
        return True

    def _read_argument(self, calls: ParsedCalls) -> Parse[bool]:
        """Read one argument; False if the answer ends in it."""
        unread = calls.unread
        key_ends = (self.key_ends,) if self.says_string is None else tuple(self.says_string)
        found = yield from unread.read_until(Literals(key_ends), MAX_NAME)
        if found is None or (self.value_opens and not (yield from unread.expect(self.value_opens))):
            return False
        key = found[0].strip(SPACE)
        calls.add_key(key)
        described = child_of(calls.schema, key, calls.schema)
        types = types_in(described, calls.schema)
        if types == {"string"} if self.says_string is None else self.says_string[found[1]]:
            value = _Trimmed(calls, trims=self.trims)
            return (yield from calls.read_string(self.value_ends, value.push))
        text = yield from self._take_value(unread, is_json=bool(types) and types <= _WRITTEN_AS_JSON)
        if text is None:
            return False
        if self.trims:
            text = text.removeprefix("\n").removesuffix("\n")
        calls.add_value(typed_value(described, calls.schema, text))
        return True

    def _take_value(self, unread: UnreadText, *, is_json: bool) -> Parse[str | None]:
        """Take a value and its end; None if the answer ends in it. An end in a string of JSON is none."""
        ends, span, text = Literals((self.value_ends,)), JsonSpan(), ""
        while found := (yield from unread.read_until(ends, MAX_VALUE)):
            text += found[0]
            if not is_json or span.end_in(found[0]) or not span.in_string or len(text) > MAX_VALUE:
                return text
            span.end_in(self.value_ends)
            text += self.value_ends
        return None


class _Trimmed:
    """A string that passes without the newlines of the markup at its ends."""

    def __init__(self, calls: ParsedCalls, *, trims: bool) -> None:
        self._calls = calls
        self._trims = trims
        self._first = True
        self._held = ""

    def push(self, text: str) -> None:
        if self._trims and self._first:
            text = text.removeprefix("\n")
        self._first = False
        text = self._held + text
        self._held = "\n" if self._trims and text.endswith("\n") else ""
        self._calls.add_string(text.removesuffix("\n") if self._held else text)
