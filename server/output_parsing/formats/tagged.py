"""Calls with a tag for each argument: `<function=f><parameter=a>1</parameter></function>`.

Strings stand there as they are, other values as JSON; only the tool's schema tells which is which.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

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
from server.output_parsing.unread_text import SPACE, Literals, Parse


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
    says_type: Mapping[str, str] | None = None
    """Ends of keys that say the type of the value, in place of `key_ends`; "" is any but a string."""
    empty_ends: tuple[str, ...] = ()
    """What ends the name of a call without arguments, and the call."""
    number_ends: str = ""
    """What stands behind a number of the call, which stands behind the name."""
    quotes: tuple[str, str] = ("", "")
    """What begins a value that may have tags in it, and what ends it in place of `value_ends`; empty if
    nothing does."""
    escapes: bool = False
    """Whether names of arguments are written as those of XML, with `&amp;` and `&quot;`."""

    @property
    def closers(self) -> tuple[str, ...]:
        return *self.ends, *self.closes

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
            key_end = self._write_key_end(lark, frozenset({"string"}))
            key = lark.sequence(lark.literal(self.key_opens), f"/{ANY_NAME}/", key_end)
            value = self._write_value_opens(lark), lark.raw(self.value_ends)
            arguments = f"({lark.sequence(ANY_SPACE, key, *value)})*"
        else:
            arguments = in_order(lark, (self._write_argument(lark, tool, each) for each in members), "")
        number = ("/[0-9]{1,3}/", lark.literal(self.number_ends)) if self.number_ends else ()
        return lark.sequence(lark.literal(name), *number, arguments, ANY_SPACE, lark.literal(self.ends[0]))

    def _write_argument(self, lark: CallGrammar, tool: ToolForm, member: Member) -> tuple[str, bool]:
        as_string = is_string(tool, member.schema)
        name = html.escape(member.name) if self.escapes else member.name
        key_end = self._write_key_end(lark, types_in(member.schema, tool.schema))
        key = lark.sequence(lark.literal(self.key_opens + name), key_end)
        begin = self._write_value_opens(lark)
        newline = "\n" if self.trims else ""
        if as_string:
            value = raw_string(lark, tool, member.schema, self.value_ends, newline)
        elif takes_any_text(tool, member.schema):
            value = lark.raw(self.value_ends, newline=newline)
        else:
            json = json_argument(lark, tool, member.schema)
            value = lark.sequence(json, lark.literal(newline + self.value_ends))
        return lark.sequence(ANY_SPACE, key, begin, lark.literal(newline), value), member.required

    def _write_value_opens(self, lark: CallGrammar) -> str:
        return lark.behind_space((self.value_opens,)) if self.value_opens else ""

    def _write_key_end(self, lark: CallGrammar, types: frozenset[str]) -> str:
        """What ends the key of a value of these types."""
        if self.says_type is None:
            return lark.literal(self.key_ends)
        if types == {"string"}:
            right = [end for end, says in self.says_type.items() if says == "string"]
        else:
            right = [end for end, says in self.says_type.items() if says != "string"]
            named = {"number" if each == "integer" else each for each in types}
            right = [end for end in right if self.says_type[end] in named] or right
        return lark.one_of(map(lark.literal, right))

    def key_heads(self, key: str) -> list[str]:
        """How an argument may begin, behind `key_opens`."""
        ends = [self.key_ends] if self.says_type is None else list(self.says_type)
        return [key + end + ("\n" if self.trims else "") for end in ends]

    def read(self, calls: ParsedCalls, opener: str) -> Parse[None]:
        if opener == self.name_opens:
            calls.repair(f"{opener} without its opener")
        elif self.name_opens and not (yield from calls.unread.expect(self.name_opens)):
            return
        if self.name_opens and (yield from calls.unread.expect(self.name_opens)):
            calls.repair(f"{self.name_opens} stands twice")
        yield from calls.read_all(partial(self._read_one, opener), self.again, self.closes)

    def _read_one(self, opener: str, calls: ParsedCalls) -> Parse[bool]:
        """Read a call behind what opens its name; False if there is none, or the answer ends in it."""
        unread = calls.unread
        line_ends = ("\n",) if self.trims else ()  # in place of a `>` that the model forgets
        end = yield from calls.read_name(*self.name_ends, *self.empty_ends, *line_ends)
        if not end:
            return False
        if end in self.empty_ends:
            calls.end("{}")
            return True
        if self.number_ends and not (yield from unread.read_until(Literals((self.number_ends,)), MAX_NAME)):
            return False
        if end == self.key_opens or end in self.ends:
            unread.give_back(end)
        elif end not in self.name_ends:
            calls.repair(f"{self.name_ends[0]} is missing behind the name")
        calls.add_arguments("{")
        while (taken := (yield from unread.expect(self.key_opens, *self.ends))) == self.key_opens:
            if not (yield from self._read_argument(calls, opener)):
                return False
        if taken is None:  # pass over what should not be there, to the end of the call
            taken = yield from unread.pass_until(Literals((*self.ends, *self.closes)), lambda _: None)
            if taken is None:
                return False
            if taken in self.closes:
                unread.give_back(taken)
            calls.repair(f"{self.ends[0]} is missing")
        calls.end("}")
        return True

    def _read_argument(self, calls: ParsedCalls, opener: str) -> Parse[bool]:
        """Read one argument; False if the answer ends in it."""
        unread, key_ends = calls.unread, [self.key_ends] if self.says_type is None else list(self.says_type)
        line_ends = ["\n"] if self.trims else []
        found = yield from unread.read_until(Literals([*key_ends, *line_ends]), MAX_NAME)
        if found is None or (self.value_opens and not (yield from unread.expect(self.value_opens))):
            return False
        if found[1] not in key_ends:
            calls.repair(f"{self.key_ends} is missing behind a key")
        key = html.unescape(found[0]) if self.escapes else found[0].strip(SPACE)
        calls.add_key(key)
        described = child_of(calls.schema, key, calls.schema)
        quote = (yield from unread.expect(self.quotes[0])) if self.quotes[0] else None
        if self.quotes[0] and unread.broke_off:
            return False
        value = _Value(self, calls, opener, quoted=quote is not None)
        types = types_in(described, calls.schema)
        if types == {"string"} if self.says_type is None else self.says_type[found[1]] == "string":
            calls.add_arguments('"')
            is_whole = yield from value.read(calls.add_string)
            calls.add_arguments('"' if is_whole else "")
            return is_whole
        pieces: list[str] = []
        is_whole = yield from value.read(pieces.append)
        if is_whole:
            calls.add_value(typed_value(described, calls.schema, calls.as_written("".join(pieces))))
        return is_whole


class _Value:
    """A value that is read up to what ends it. An end which neither a tag nor the end of the call follows is
    a part of it."""

    def __init__(self, form: Tagged, calls: ParsedCalls, opener: str, *, quoted: bool) -> None:
        self._form = form
        self._calls = calls
        self._behind_call = form.closes or (opener,)
        line = "\n" if form.trims else ""
        self._end = form.quotes[1] if quoted else form.value_ends
        self._next_keys, self._call_ends = line + form.key_opens, tuple(line + end for end in form.ends)
        self._ends = Literals((self._end,) if quoted else (self._end, self._next_keys, *self._call_ends))
        self._first = True
        self._held = ""
        """A newline, which is markup if the value ends behind it."""

    def read(self, emit: Callable[[str], None]) -> Parse[bool]:
        """Pass the value on without newlines of the markup; False if the answer ends in it."""
        unread = self._calls.unread

        def push(text: str) -> None:
            self._push(text, emit)

        while end := (yield from unread.pass_until(self._ends, push, in_markup=True)):
            if (yield from self._ends_here(end)):
                return True
            push(end)
        return False

    def _push(self, text: str, emit: Callable[[str], None]) -> None:
        if self._form.trims:
            if self._first:
                text = text.removeprefix("\n")
                self._first = False
            text = self._held + text
            self._held = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        if text:
            emit(text)

    def _ends_here(self, end: str) -> Parse[bool]:
        """Whether this literal ends the value. One that stands in place of the right one is put back."""
        form, unread = self._form, self._calls.unread
        if end == self._end:
            return (yield from unread.is_next(form.key_opens, *form.ends, *form.closes, *form.again))
        if end == self._next_keys:
            is_end = yield from self._key_is_next()
        else:
            is_end = yield from unread.is_next(*self._behind_call)
        if is_end:
            unread.give_back(end.lstrip("\n"))
            self._calls.repair(f"{form.value_ends} is missing")
        return is_end

    def _key_is_next(self) -> Parse[bool]:
        """Whether the key of another argument of the tool is next, and what ends it."""
        schema, unread = self._calls.schema, self._calls.unread
        properties = schema.get("properties")
        heads = [head for key in properties or () for head in self._form.key_heads(key)]
        return bool(heads) and (yield from unread.is_next(*heads))
