"""Calls whose name stands before the object of their arguments: `[TOOL_CALLS]f[ARGS]{"a": 1}`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from server.answers.calls import MAX_NAME, Calls, pass_json
from server.answers.source import Literals, Reading
from server.grammars.tool_grammar import SPACE, Lark, ToolForm


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

    def write(self, lark: Lark, tools: Sequence[ToolForm], opener: str, several: bool) -> str:
        one = lark.one_of(self._write_one(lark, tool) for tool in tools)
        another = ""
        if several and self.holds_several(opener):
            another = f"({lark.sequence(SPACE, lark.literal(self.again[0]), one)})*"
        ends = (SPACE, lark.literal(self.closes[0])) if self.closes else ()
        return lark.sequence(lark.literal(self.begins), one, another, *ends)

    def _write_one(self, lark: Lark, tool: ToolForm) -> str:
        before, number = self.name_form
        header = [lark.literal(before + tool.name + number), "/[0-9]{1,4}/" if number else ""]
        if self.name_ends:
            header.append(lark.literal(self.name_ends[0]))
        ends = (SPACE, lark.literal(self.ends[0])) if self.ends else ()
        return lark.sequence(*header, lark.json(tool.schema, strict=tool.strict), *ends)

    def read(self, calls: Calls, opener: str) -> Reading[None]:
        source = calls.source
        if self.begins and not (yield from source.expect(self.begins)):
            return
        while (yield from self._read_one(calls)):
            if self.ends:
                yield from source.expect(*self.ends)
            source.remember()
            if not self.again or not (yield from source.expect(*self.again)):
                break
        if self.closes and calls.count:
            yield from source.expect(*self.closes)

    def _read_one(self, calls: Calls) -> Reading[bool]:
        """Read a call; False if there is none, or the answer ends in it."""
        source = calls.source
        found = yield from source.read_until(Literals((*self.name_ends, "{")), MAX_NAME)
        if found is None:
            return False
        header, end = found
        if end == "{":
            source.give_back(end)
        elif (yield from source.peek()) != "{":
            return False
        if not calls.begin(*self.split(calls.as_written(header).strip())):
            return False
        if not (yield from pass_json(source, calls.argue)):
            return False
        calls.end()
        return True
