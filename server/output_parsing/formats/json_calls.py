"""Calls with their arguments as JSON: in an object, `{"name": "f", "arguments": {"a": 1}}`,
or behind the name, `[TOOL_CALLS]f[ARGS]{"a": 1}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from server.output_parsing.formats.call_format import (
    ANY_SPACE,
    MAX_NAME,
    NAMESPACE,
    CallFormat,
    CallGrammar,
    ParsedCalls,
    ToolForm,
)
from server.output_parsing.json_span import JsonSpan
from server.output_parsing.unread_text import Literals, Parse, pass_json, read_string
from server.text.detokenizer import is_mark

_NAMES = ("name", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters")
_IDS = ("id", "tool_call_id")
_NO_ARGUMENTS = "the arguments are missing"


@dataclass(frozen=True, slots=True)
class JsonObject:
    closes: tuple[str, ...] = ()
    """What ends a call, or the array of them."""
    again: tuple[str, ...] = ()
    """What stands between calls that are in no array."""
    array: bool = False
    """Whether an array of calls may stand there, in place of one."""
    name_is_key: bool = False
    """Whether an object has the arguments under the name itself, as in `{"f": {"a": 1}}`."""

    keys: tuple[str, str] = (_NAMES[0], _ARGUMENTS[0])
    """The keys of the name and of the arguments, as the family writes them."""
    numbered_by: str = ""
    """The key of a number that it writes before the name, if it does."""

    @property
    def closers(self) -> tuple[str, ...]:
        return self.closes

    def holds_several(self, opener: str) -> bool:
        return self.array or (bool(self.again) and opener not in self.again)

    def write(self, lark: CallGrammar, tools: Sequence[ToolForm], opener: str, several: bool) -> str:
        one = lark.one_of(self._write_one(lark, tool, opener) for tool in tools)
        if self.array:
            one = lark.many(one, '", "') if several else one
            one = lark.sequence("" if opener.endswith("[") else '"["', one, '"]"')
        elif several and self.holds_several(opener):
            another = lark.one_of(self._write_one(lark, tool, "") for tool in tools)
            between = self.again[0] + ("" if self.again[0].isspace() else " ")
            one = lark.sequence(one, f"({lark.literal(between)} {another})*")
        before = "" if opener[-1:] in ("{", "[") else ANY_SPACE
        return lark.sequence(before, one, lark.behind_space(self.closes))

    def _write_one(self, lark: CallGrammar, tool: ToolForm, opener: str) -> str:
        arguments, name = lark.json_of(tool.schema, strict=tool.strict), json.dumps(tool.name)
        begin = "" if opener.endswith("{") else "{"
        if self.name_is_key:
            return lark.sequence(lark.literal(f"{begin}{name}: "), arguments, '"}"')
        name_key, arguments_key = self.keys
        rest = lark.literal(f'"{name_key}": {name}, "{arguments_key}": ')
        start = (lark.literal(begin),)
        if self.numbered_by:
            start = lark.literal(f'{begin}"{self.numbered_by}": "'), "/[0-9]{1,3}/", '"\\", "'
        return lark.sequence(*start, rest, arguments, '"}"')

    def read(self, calls: ParsedCalls, opener: str) -> Parse[None]:
        unread = calls.unread
        if opener[-1:] in ("{", "["):
            unread.give_back(opener[-1])
        in_array = self.array and bool((yield from unread.expect("[")))
        again, end = ((",",), ("]",)) if in_array else (self.again, ())
        begun = calls.count
        yield from calls.read_all(self._read_one, again, end or self.closes)
        if end and calls.count > begun and not calls.is_open and not unread.remembers:
            yield from unread.expect(*self.closes)

    def _read_one(self, calls: ParsedCalls) -> Parse[bool]:
        return (yield from _Object(calls, name_is_key=self.name_is_key).read())


_SCALAR = "0123456789.+-eEtrufalsn"
"""The characters of numbers, booleans and null."""


class _Object:
    """One object, whose fields come in any order. Arguments pass as they come once the name is known."""

    def __init__(self, calls: ParsedCalls, *, name_is_key: bool) -> None:
        self._name_is_key = name_is_key
        self._calls = calls
        self._unread = calls.unread
        self._name: str | None = None
        self._id = ""
        self._held: list[str] | None = None
        self._last = ""
        """The last character of the arguments, which passes when the call is complete."""
        self._begun = self._argued = False

    def read(self) -> Parse[bool]:
        """Read the object; False if it is none, names no tool, or the answer ends in it."""
        if not (yield from self._unread.expect("{")):
            return False
        while True:
            key = yield from read_string(self._unread)
            if key is None or not (yield from self._unread.expect(":")):
                return False
            if not (yield from self._read_field(key)):
                return False
            match (yield from self._unread.expect(",", "}")):
                case "}":
                    return self._end()
                case None:
                    return False

    def _read_field(self, key: str) -> Parse[bool]:
        if self._name_is_key and self._name is None:
            self._name = key
            return (yield from self._read_arguments())
        if key in _ARGUMENTS and not self._argued:
            return (yield from self._read_arguments())
        if (yield from self._unread.peek()) in ('"', "'"):
            value = yield from read_string(self._unread)
            if key in _NAMES:
                self._name = value
            elif key in _IDS:
                self._id = value or ""
            return value is not None
        return (yield from self._skip_value())

    def _read_arguments(self) -> Parse[bool]:
        if self._name is None:
            self._held = []
            emit = self._held.append
        elif not self._begin():
            return False
        else:
            emit = self._calls.add_arguments
        self._argued = True
        match (yield from self._unread.peek()):
            case "{" | "[":
                self._last = yield from pass_json(self._unread, emit)
                return bool(self._last)
            case '"' | "'":
                text = yield from read_string(self._unread)  # JSON within JSON
                if text in ("", "null"):
                    self._calls.repair(_NO_ARGUMENTS)
                elif text:
                    text = _as_json(text)
                    emit(text[:-1])
                    self._last = text[-1]
                return text is not None
            case _:  # null, or a number
                self._calls.repair(_NO_ARGUMENTS)
                return (yield from self._skip_value())

    def _skip_value(self) -> Parse[bool]:
        if (yield from self._unread.peek()) in ("{", "["):
            return bool((yield from pass_json(self._unread, lambda _: None)))
        yield from self._unread.peek(skip=_SCALAR)
        return True

    def _begin(self) -> bool:
        self._begun = self._name is not None and self._calls.begin(self._name, self._id)
        return self._begun

    def _end(self) -> bool:
        if not self._begun and not self._begin():
            return False
        for piece in self._held or ():
            self._calls.add_arguments(piece)
        self._calls.end(self._last or "{}")
        return True


def _as_json(text: str) -> str:
    """The JSON that a text has, or else the text as a string of JSON."""
    span = JsonSpan()
    span.end_in(text)
    mended = span.mended(text)
    try:
        json.loads(mended)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return mended


_RECIPIENT = re.compile(r"to=([^\s<]+)")
"""The recipient in the header of a message of gpt-oss, where special tokens are written out."""


def plain(name: str) -> tuple[str, str]:
    """The name of the function and the id of the call, where a format writes the name alone."""
    return name, ""


def numbered(header: str) -> tuple[str, str]:
    """The same where it writes `functions.f:0`, which is the id too."""
    return header.removeprefix(NAMESPACE).rpartition(":")[0], header


def with_call_id(header: str) -> tuple[str, str]:
    """The same where an id may stand behind the name, as in Mistral's history."""
    name, _, id = header.partition("[CALL_ID]")
    return name, id


@dataclass(frozen=True, slots=True)
class NamedJson:
    begins: str = ""
    """What stands between the opener of a section and the first name."""
    name_ends: tuple[str, ...] = ()
    """What stands between the name and the arguments, if anything does."""
    ends: tuple[str, ...] = ()
    """What stands behind the arguments."""
    again: tuple[str, ...] = ()
    """What stands before the name of another call."""
    closes: tuple[str, ...] = ()
    """What ends the section."""
    split: Callable[[str], tuple[str, str]] = plain
    name_form: tuple[str, str] = ("", "")
    """What is written before the name, and what between it and a number, if there is one."""

    @property
    def closers(self) -> tuple[str, ...]:
        return *self.ends, *self.closes

    def holds_several(self, opener: str) -> bool:
        return bool(self.again) and opener not in self.again

    def write(self, lark: CallGrammar, tools: Sequence[ToolForm], opener: str, several: bool) -> str:
        one = lark.one_of(self._write_one(lark, tool) for tool in tools)
        another = ""
        if several and self.holds_several(opener):
            another = f"({lark.sequence(ANY_SPACE, lark.literal(self.again[0]), one)})*"
        return lark.sequence(lark.literal(self.begins), one, another, lark.behind_space(self.closes))

    def _write_one(self, lark: CallGrammar, tool: ToolForm) -> str:
        before, number = self.name_form
        return lark.sequence(
            lark.literal(before + tool.name + number),
            "/[0-9]{1,4}/" if number else "",
            lark.literal("".join(self.name_ends[:1])),
            lark.json_of(tool.schema, strict=tool.strict),
            lark.behind_space(self.ends),
        )

    def read(self, calls: ParsedCalls, opener: str) -> Parse[None]:
        if self.begins:
            yield from calls.read_section(self._read_one, self.begins, self.again, self.closes)
        else:
            yield from calls.read_all(self._read_one, self.again, self.closes)

    def _read_one(self, calls: ParsedCalls) -> Parse[bool]:
        """Read a call; False if there is none, or the answer ends in it."""
        unread = calls.unread
        ends = Literals((*self.name_ends, "{"))
        found = yield from unread.read_until(ends, MAX_NAME, calls.may_begin)
        if found is None:
            return False
        header, end = found
        if end == "{":
            unread.give_back(end)
        is_empty = bool((yield from unread.expect(*self.ends)))
        if not is_empty and (yield from unread.peek()) != "{":
            return False
        if not calls.begin(*self.split(calls.as_written(header).strip())):
            return False
        if is_empty:
            calls.repair(_NO_ARGUMENTS)
            calls.end("{}")
            return True
        if not (last := (yield from pass_json(unread, calls.add_arguments))):
            return False
        calls.end(last)
        yield from unread.expect(*self.ends)
        return True


@dataclass(frozen=True, slots=True)
class Channels:
    """Calls as messages to a function, in a channel of gpt-oss: `<|channel|>commentary to=functions.f ...`.

    One message is one call. Its header has the recipient before or behind the channel's name.
    """

    channel: str
    """The channel, behind a recipient that stands before it."""
    header_ends: str
    """What stands between the header and the arguments."""
    constrains: tuple[str, ...]
    """What a header may say of the form of the arguments."""
    ends: tuple[str, ...]
    """What ends the message."""

    @property
    def closers(self) -> tuple[str, ...]:
        return self.ends

    def holds_several(self, opener: str) -> bool:
        return False

    def write(self, lark: CallGrammar, tools: Sequence[ToolForm], opener: str, several: bool) -> str:
        recipient = NAMESPACE if opener.endswith("to=") else ""
        channel = "" if opener.endswith(f"{self.channel} to=") else self.channel
        constrains = lark.one_of(map(lark.literal, self.constrains))
        calls = (
            lark.sequence(
                lark.literal(recipient + tool.name + channel),
                f"{constrains}?",
                lark.literal(self.header_ends),
                lark.json_of(tool.schema, strict=tool.strict),
            )
            for tool in tools
        )
        return lark.one_of(calls)

    def read(self, calls: ParsedCalls, opener: str) -> Parse[None]:
        unread = calls.unread
        found = yield from unread.read_until(Literals((self.header_ends,)), MAX_NAME)
        recipient = _RECIPIENT.search(calls.as_written(opener + found[0])) if found else None
        if recipient is None:
            return
        if calls.begin(recipient[1].removeprefix(NAMESPACE)):
            if (yield from unread.expect(*self.ends)):
                calls.repair(_NO_ARGUMENTS)
                calls.end("{}")
            elif last := (yield from pass_json(unread, calls.add_arguments)):
                calls.end(last)
                yield from unread.expect(*self.ends)
        elif not recipient[1].startswith(NAMESPACE):  # a tool of the model's own, which nobody offers
            unread.forget()
            yield from unread.pass_until(Literals(self.ends), lambda _: None)


@dataclass(frozen=True, slots=True)
class EitherFormat:
    """Calls that a family writes in one of two ways, told apart by their first character."""

    first: str
    """The first character of what `format` reads."""
    format: CallFormat
    other: CallFormat
    other_by: str = ""
    """The special token of vocabularies whose models write as `other` reads."""

    def _written(self) -> CallFormat:
        """The way in which a model writes whose tokens are known: the one that needs the most of them."""
        return self.other if self.other_by and is_mark(self.other_by) else self.format

    @property
    def closers(self) -> tuple[str, ...]:
        return *self.format.closers, *self.other.closers

    def holds_several(self, opener: str) -> bool:
        return self._written().holds_several(opener)

    def write(self, lark: CallGrammar, tools: Sequence[ToolForm], opener: str, several: bool) -> str:
        return self._written().write(lark, tools, opener, several)

    def read(self, calls: ParsedCalls, opener: str) -> Parse[None]:
        next_char = yield from calls.unread.peek()
        yield from (self.format if next_char == self.first else self.other).read(calls, opener)
