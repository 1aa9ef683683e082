"""Calls written as Python: `[f(a=1, b="x"), g()]`, or one call on each line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.output_parsing.formats.arguments import (
    Member,
    child_of,
    in_order,
    json_argument,
    members_of,
    typed_value,
    types_in,
    value_spelled,
)
from server.output_parsing.formats.call_format import (
    ANY_NAME,
    ANY_SPACE,
    MAX_NAME,
    CallGrammar,
    ParsedCalls,
    ToolForm,
)
from server.output_parsing.unread_text import MAX_VALUE, SPACE, Literals, Parse, UnreadText

_OPEN, _CLOSE = "([{", ")]}"


@dataclass(frozen=True, slots=True)
class PythonCalls:
    closes: tuple[str, ...] = ()
    """What ends the section, behind the list."""
    in_list: bool = True
    """Whether the calls stand in a list; otherwise each begins behind space."""

    @property
    def closers(self) -> tuple[str, ...]:
        return self.closes

    def holds_several(self, opener: str) -> bool:
        return True

    def write(self, lark: CallGrammar, tools: Sequence[ToolForm], opener: str, several: bool) -> str:
        one = lark.one_of(_write_call(lark, tool) for tool in tools)
        if several:
            one = lark.many(one, '", "' if self.in_list else '"\\n"')
        begin = '"["' if self.in_list and not opener.endswith("[") else ""
        end = '"]"' if self.in_list else ""
        closes = lark.behind_space(self.closes)
        return lark.sequence("" if self.in_list else ANY_SPACE, begin, one, end, closes)

    def read(self, calls: ParsedCalls, opener: str) -> Parse[None]:
        unread = calls.unread
        if self.in_list and not opener.endswith("[") and not (yield from unread.expect("[")):
            return
        begun = calls.count
        if self.in_list:
            calls.in_list = True
            yield from calls.read_all(_read_call, (",",), ("]",))
            if calls.count == begun or calls.is_open or unread.broke_off:
                return
            calls.release()
        else:
            while (yield from _read_call(calls)) and (yield from unread.peek()) not in ("", "<"):
                unread.remember()
        if not unread.remembers:
            yield from unread.expect(*self.closes)


def _write_call(lark: CallGrammar, tool: ToolForm) -> str:
    members = members_of(lark, tool, tool.schema)
    if members is None:
        value = lark.sequence(f"/{ANY_NAME}=/", lark.json_of({}))
        arguments = f'({value} (", " {value})*)?'
    else:
        arguments = in_order(lark, (_write_argument(lark, tool, each) for each in members), '", "')
    return lark.sequence(lark.literal(tool.name + "("), arguments, '")"')


def _write_argument(lark: CallGrammar, tool: ToolForm, member: Member) -> tuple[str, bool]:
    value = json_argument(lark, tool, member.schema)
    types = types_in(member.schema, tool.schema)
    if types == {"boolean"}:
        value = lark.one_of((value, '("True" | "False")'))
    return lark.sequence(lark.literal(member.name + "="), value), member.required


def _read_call(calls: ParsedCalls) -> Parse[bool]:
    """Read one call; False if there is none, or the answer ends in it."""
    unread = calls.unread
    if not (yield from calls.read_name("(")):
        return False
    calls.add_arguments("{")
    while (yield from unread.peek(SPACE + ",")) != ")":
        name = yield from unread.read_until(Literals(["="]), MAX_NAME)
        if name is None:
            return False
        key = name[0].strip(SPACE)
        calls.add_key(key)
        if not (yield from _read_value(calls, child_of(calls.schema, key, calls.schema))):
            return False
    unread.take(1)
    calls.end("}")
    return True


def _read_value(calls: ParsedCalls, described: object) -> Parse[bool]:
    """Read a literal up to the comma or parenthesis behind it, and pass it on as JSON."""
    unread = calls.unread
    yield from unread.peek()
    text, depth = "", 0
    while True:
        char = yield from unread.peek(skip="")
        if not char or len(text) > MAX_VALUE:
            return False
        if char in "'\"":
            quoted = yield from _take_string(unread)
            if quoted is None:
                return False
            text += quoted
            continue
        if depth == 0 and char in ",)":
            break
        depth += (char in _OPEN) - (char in _CLOSE)
        text += unread.take(1)
    text = text.strip()
    try:
        calls.add_value(value_spelled(text, python=True))
    except ValueError:
        calls.add_value(typed_value(described, calls.schema, text))
    return True


def _take_string(unread: UnreadText) -> Parse[str | None]:
    """Take a string with its quotes; None if it does not end."""
    quote = unread.take(1)
    ends, text = Literals([quote]), quote
    while found := (yield from unread.read_until(ends, MAX_VALUE)):
        text += "".join(found)
        backslashes = len(found[0]) - len(found[0].rstrip("\\"))
        if backslashes % 2 == 0:
            return text
        if len(text) > MAX_VALUE:
            return None
    return None
