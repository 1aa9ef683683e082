"""The interface of all formats of tool calls, and what their readers and grammars share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from server.grammars.json_schema import escapes_for
from server.grammars.lark import ANY_TEXT, WHITESPACE, LarkGrammar, exactly, quoted
from server.output_parsing.unread_text import (
    SPACE,
    AnswerPart,
    Arguments,
    CallBegun,
    CallEnded,
    Literals,
    Parse,
    UnreadText,
)
from server.text.characters import whole_characters

MAX_NAME = 256
"""The most characters of a name with what surrounds it: more is text."""
NAMESPACE = "functions."
"""What some families write before the name of every function."""
ANY_SPACE = "SPACE?"
"""Some space between tokens of markup, or none."""
ANY_NAME = "[A-Za-z_][A-Za-z0-9_]{0,63}"
"""A regular expression of names of arguments, where the schema names none."""

Schema = Mapping[str, Any]
ANY_OBJECT: Schema = {"type": "object"}


class Unenforceable(Exception):
    """A tool's schema asks for something that no grammar of this dialect can hold a model to."""

    def __init__(self, keyword: str, tool: str = "") -> None:
        super().__init__(keyword)
        self.keyword = keyword
        self.tool = tool
        """The name of the tool; empty if it is not the schema of one."""


@dataclass(frozen=True, slots=True)
class ToolForm:
    """A tool, and what a call of it is held to."""

    name: str
    schema: Schema
    """The schema that arguments are held to; ANY_OBJECT leaves them free."""
    strict: bool = False
    """Whether what cannot be enforced is refused, and not left out."""


class CallGrammar(LarkGrammar):
    """A grammar of calls under way. Marks stand for special tokens in its literals."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        super().__init__(tokens)
        self.dropped: dict[str, None] = {}
        """What of the tools' schemas could not be enforced and is left out, as `tool: keyword`."""

    def whole(self, start: str) -> str:
        """The text of the grammar. `start` is the expression of the answer."""
        return self.text(start, r"SPACE: /[ \n]{1,8}/")

    def many(self, one: str, between: str) -> str:
        """One or more of these."""
        return f"{one} ({between} {one})*"

    def behind_space(self, literals: Sequence[str]) -> str:
        """The first of these literals, perhaps with space before it; empty if there are none."""
        return f"{ANY_SPACE} {self.literal(literals[0])}" if literals else ""

    def json_of(self, schema: Schema, *, strict: bool = False) -> str:
        """JSON of a schema. What of it cannot be enforced is left out, if it is not `strict`."""
        options = {"whitespace_pattern": WHITESPACE, **({} if strict else {"lenient": True})}
        return self.json({**schema, "x-guidance": {**options, **escapes_for(schema)}})

    def raw(self, end: str, least: int = 0, most: int | None = None, newline: str = "") -> str:
        """Text of any characters, so many at least and at most, and the literal that ends it, which may
        stand on a new line."""
        count = "*" if not least and most is None else f"{{{least},{'' if most is None else most}}}"
        if self.has_token(end):  # no text has a special token, so that this is the first
            first = self._pieces(end)[0]
            before = "" if first in self._tokens else first
            ends = exactly(newline + before)
            return self.sequence(f"/(?s:.{count}){ends}/", self.literal(end[len(before) :]))
        without = f"/(?s:.{count}){exactly(newline)}/ & ~/(?s:.*){exactly(end)}(?s:.*)/"
        return self.rule(f"({without}) {quoted(end)}", terminal=True)

    def without(self, literal: str) -> str:
        """Text of any characters in which a literal does not stand; may be empty."""
        return ANY_TEXT if not literal or self.has_token(literal) else self.text_without([literal])

    def drop(self, tool: ToolForm, keyword: str) -> None:
        """Note that a keyword is not enforced. Raises Unenforceable if it has to be."""
        if tool.strict:
            raise Unenforceable(keyword, tool.name)
        self.dropped[f"{tool.name}: {keyword}"] = None


class ParsedCalls:
    """The calls of one answer, of which a format's reader says what it reads."""

    def __init__(
        self,
        unread: UnreadText,
        parts: list[AnswerPart],
        tools: Mapping[str, Schema],
        written: Mapping[int, str],
        on_begin: Callable[[], None],
    ) -> None:
        """`written` is the text of each mark that stands for a special token."""
        self.unread = unread
        self.count = 0
        """The number of calls that have begun."""
        self.schema: Schema = {}
        """The schema of the arguments of the call that began last."""
        self.holds = True
        """Whether a call passes when it has ended, so that one that breaks off never passes."""
        self.in_list = False
        """Whether calls stand in a list, none of which passes before the list has ended."""
        self.is_open = False
        """Whether the call that began last has not ended."""
        self.repairs: list[str] = []
        """What was wrong with calls that were read nonetheless, one entry each."""
        self._parts = parts
        self._held: list[AnswerPart] = []
        self._ids = set[str]()
        """The ids that the model has written."""
        self._passed = 0
        """The number of calls that have passed or may do so."""
        self._tools = tools
        self._written = written
        self._on_begin = on_begin
        self._between = ""
        """What stands between the last key's value and the next key, if there was one."""
        self._wrong = ""
        """What is wrong with the call that is being read, though it can be told what it says."""

    def begin(self, name: str, id: str = "") -> bool:
        """Begin a call; False if no tool has this name, so that this is no call.

        An `id` that the answer has already is none: clients tell calls apart by it.
        """
        if name not in self._tools:
            return False
        id = "" if id in self._ids else id
        self._ids.add(id)
        self.unread.forget()
        self._on_begin()
        self._pass(CallBegun(self.count, name, id))
        self.schema = self._tools[name]
        self.count += 1
        self.is_open = True
        self._between = ""
        return True

    def may_begin(self, header: str) -> bool:
        """Whether the name of a tool may stand in a header that begins so."""
        begun = self.as_written(header).lstrip(SPACE).removeprefix(NAMESPACE)
        return NAMESPACE.startswith(begun) or any(
            name.startswith(begun) or begun.startswith(name) for name in self._tools
        )

    def read_name(self, *ends: str) -> Parse[str]:
        """Begin the call of the tool whose name ends here; returns the end, or "" if this is no call."""
        found = yield from self.unread.read_until(Literals(ends), MAX_NAME, self.may_begin)
        return found[1] if found is not None and self.begin(found[0].strip(SPACE)) else ""

    def read_all(
        self, one: Callable[[ParsedCalls], Parse[bool]], again: Sequence[str], closes: Sequence[str] = ()
    ) -> Parse[None]:
        """Read calls as `one` does, with what stands before others and what ends them all."""
        while (yield from one(self)):
            self.unread.remember()
            skip = SPACE.replace("\n", "") if "\n" in again else SPACE
            if not (yield from self.unread.expect(*again, skip=skip)):
                if not self.unread.broke_off:
                    self.unread.forget()
                    yield from self.unread.expect(*closes)
                return

    def read_section(
        self,
        one: Callable[[ParsedCalls], Parse[bool]],
        begins: str,
        again: Sequence[str],
        closes: Sequence[str],
    ) -> Parse[None]:
        """The same for a section in which text stands for nothing that is not within calls."""
        next_call: Sequence[str] = (begins,)
        while True:
            found = yield from self.unread.read_until(Literals((*next_call, *closes)), MAX_NAME)
            if found is None:
                return
            if found[0].strip():
                self.repair("text between the markers of calls")
            if found[1] in closes:
                self.unread.forget()
                return
            if not (yield from one(self)):
                return
            next_call = again
            self.unread.remember()

    def read_string(self, end: str, emit: Callable[[str], None] | None = None) -> Parse[bool]:
        """Pass a string on up to the literal that ends it; False if the answer ends in it."""
        self.add_arguments('"')
        found = yield from self.unread.pass_until(Literals((end,)), emit or self.add_string, in_markup=True)
        self.add_arguments('"' if found else "")
        return found is not None

    def as_written(self, text: str) -> str:
        """Text in which marks are special tokens again."""
        return text.translate(self._written)

    def add_arguments(self, text: str) -> None:
        """Pass on more of the arguments, which are JSON."""
        if text:
            self._pass(Arguments(self.count - 1, self.as_written(text)))

    def add_string(self, text: str) -> None:
        """Pass on more of a string, which the format writes without JSON's escapes."""
        self.add_arguments(json.dumps(self.as_written(text), ensure_ascii=False)[1:-1])

    def add_key(self, key: str) -> None:
        """Pass on the next key of the arguments, behind what stands before it."""
        self.add_arguments(f"{self._between}{json.dumps(key, ensure_ascii=False)}: ")
        self._between = ", "

    def add_value(self, value: object) -> None:
        """Pass on a whole value."""
        self.add_arguments(whole_characters(json.dumps(value, ensure_ascii=False)))

    def end(self, closing: str = "") -> None:
        """End the call, whose arguments end with this."""
        self.add_arguments(closing)
        self._pass(CallEnded(self.count - 1))
        self.is_open = False
        if self._wrong:
            self.repairs.append(self._wrong)
            self._wrong = ""
        if not self.in_list:
            self.release()

    def release(self) -> None:
        """Pass the calls on that were held and have ended."""
        self._parts += self._held
        self._held.clear()
        self._passed = self.count
        self.in_list = False

    def repair(self, wrong: str) -> None:
        """Note what is wrong with the call that is being read, in a few words."""
        self._wrong = wrong

    def abandon(self) -> None:
        """Drop what was held of calls that have not ended, and forget what was wrong with them."""
        if self.holds or self.in_list:
            self.count = self._passed
        self._held.clear()
        self.is_open = self.in_list = False
        self._wrong = ""

    def _pass(self, part: AnswerPart) -> None:
        (self._held if self.holds or self.in_list else self._parts).append(part)


class CallFormat(Protocol):
    """A way to write calls."""

    @property
    def closers(self) -> tuple[str, ...]:
        """What ends calls and sections of them, which is no text behind a call."""
        ...

    def read(self, calls: ParsedCalls, opener: str) -> Parse[None]:
        """Read all calls behind this opener. If there is none, return before any has begun."""
        ...

    def write(self, lark: CallGrammar, tools: Sequence[ToolForm], opener: str, several: bool) -> str:
        """An expression of what stands behind this opener: one call, or as many as stand behind one opener.

        `several`: whether there may be more than one.
        """
        ...

    def holds_several(self, opener: str) -> bool:
        """Whether one opener stands before several calls; otherwise each has its own."""
        ...
