"""Calls whose name stands before the object of their arguments: `[TOOL_CALLS]f[ARGS]{"a": 1}`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from server.answers.formats.call_format import (
    MAX_NAME,
    SPACE,
    CallFormat,
    CallGrammar,
    ParsedCalls,
    ToolForm,
)
from server.answers.unread_text import Literals, Parse, pass_json
from server.text.detokenizer import is_mark

_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
"""The recipient in the header of a message of gpt-oss, where special tokens are written out."""


def plain(name: str) -> tuple[str, str]:
    """The name of the function and the id of the call, where a format writes the name alone."""
    return name, ""


def numbered(header: str) -> tuple[str, str]:
    """The same where it writes `functions.f:0`, which is the id too."""
    return header.removeprefix("functions.").rpartition(":")[0], header


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

    def holds_several(self, opener: str) -> bool:
        return bool(self.again) and opener not in self.again

    def write(self, lark: CallGrammar, tools: Sequence[ToolForm], opener: str, several: bool) -> str:
        one = lark.one_of(self._write_one(lark, tool) for tool in tools)
        another = ""
        if several and self.holds_several(opener):
            another = f"({lark.sequence(SPACE, lark.literal(self.again[0]), one)})*"
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
        unread = calls.unread
        if self.begins and not (yield from unread.expect(self.begins)):
            return
        while (yield from self._read_one(calls)):
            yield from unread.expect(*self.ends)
            unread.remember()
            if not (yield from unread.expect(*self.again)):
                break
        if calls.count:
            yield from unread.expect(*self.closes)

    def _read_one(self, calls: ParsedCalls) -> Parse[bool]:
        """Read a call; False if there is none, or the answer ends in it."""
        unread = calls.unread
        found = yield from unread.read_until(Literals((*self.name_ends, "{")), MAX_NAME)
        if found is None:
            return False
        header, end = found
        if end == "{":
            unread.give_back(end)
        elif (yield from unread.peek()) != "{":
            return False
        if not calls.begin(*self.split(calls.as_written(header).strip())):
            return False
        if not (yield from pass_json(unread, calls.add_arguments)):
            return False
        calls.end()
        return True


@dataclass(frozen=True, slots=True)
class Channels:
    """Calls as messages to a function, in a channel of gpt-oss: `<|channel|>commentary to=functions.f ...`.

    One message is one call. Its header has the recipient before or behind the channel's name.
    """

    header_ends: str
    """What stands between the header and the arguments."""
    constrains: str
    """What a header says of the form of the arguments."""
    ends: tuple[str, ...]
    """What ends the message."""

    def holds_several(self, opener: str) -> bool:
        return False

    def write(self, lark: CallGrammar, tools: Sequence[ToolForm], opener: str, several: bool) -> str:
        recipient = "functions." if opener.endswith("to=") else ""
        calls = (
            lark.sequence(
                lark.literal(recipient + tool.name + self.constrains + self.header_ends),
                lark.json_of(tool.schema, strict=tool.strict),
            )
            for tool in tools
        )
        return lark.one_of(calls)

    def read(self, calls: ParsedCalls, opener: str) -> Parse[None]:
        unread = calls.unread
        found = yield from unread.read_until(Literals((self.header_ends,)), MAX_NAME)
        if found is None:
            return
        recipient = _RECIPIENT.search(calls.as_written(opener + found[0]))
        if recipient is None or not calls.begin(recipient.group(1)):
            return
        if (yield from pass_json(unread, calls.add_arguments)):
            calls.end()
            yield from unread.expect(*self.ends)


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

    def holds_several(self, opener: str) -> bool:
        return self._written().holds_several(opener)

    def write(self, lark: CallGrammar, tools: Sequence[ToolForm], opener: str, several: bool) -> str:
        return self._written().write(lark, tools, opener, several)

    def read(self, calls: ParsedCalls, opener: str) -> Parse[None]:
        next_char = yield from calls.unread.peek()
        yield from (self.format if next_char == self.first else self.other).read(calls, opener)
