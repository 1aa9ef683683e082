"""Calls written as Python: `[f(a=1, b="x"), g()]`, or one call on each line."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass

from server.answers.calls import MAX_NAME, MAX_VALUE, Calls
from server.answers.source import SPACE, Literals, Reading, Source

_OPEN, _CLOSE = "([{", ")]}"


@dataclass(frozen=True, slots=True)
class PythonCalls:
    closes: tuple[str, ...] = ()
    """What ends the section, behind the list."""
    in_list: bool = True
    """Whether the calls stand in a list; otherwise each begins behind space."""

    def read(self, calls: Calls, opener: str) -> Reading[None]:
        source = calls.source
        if self.in_list and not opener.endswith("[") and not (yield from source.expect("[")):
            return
        while (yield from _read_call(calls)):
            source.remember()
            if self.in_list:
                if (yield from source.expect(",", "]")) != ",":
                    break
            elif (yield from source.peek()) in ("", "<"):
                break
        if calls.count and self.closes:
            yield from source.expect(*self.closes)


def _read_call(calls: Calls) -> Reading[bool]:
    """Read one call; False if there is none, or the answer ends in it."""
    source = calls.source
    found = yield from source.read_until(Literals(["("]), MAX_NAME)
    if found is None or not calls.begin(found[0].strip(SPACE)):
        return False
    calls.argue("{")
    count = 0
    while (yield from source.peek(SPACE + ",")) != ")":
        name = yield from source.read_until(Literals(["="]), MAX_NAME)
        if name is None:
            return False
        calls.argue((", " if count else "") + json.dumps(name[0].strip(SPACE)) + ": ")
        count += 1
        if not (yield from _read_value(calls)):
            return False
    source.take(1)
    calls.argue("}")
    calls.end()
    return True


def _read_value(calls: Calls) -> Reading[bool]:
    """Read a literal up to the comma or parenthesis behind it, and pass it on as JSON."""
    source = calls.source
    yield from source.peek()
    text, depth = "", 0
    while True:
        char = yield from source.peek(skip="")
        if not char or len(text) > MAX_VALUE:
            return False
        if char in "'\"":
            quoted = yield from _take_string(source)
            if quoted is None:
                return False
            text += quoted
            continue
        if depth == 0 and char in ",)":
            break
        depth += (char in _OPEN) - (char in _CLOSE)
        text += source.take(1)
    calls.argue(_as_json(text.strip()))
    return True


def _take_string(source: Source) -> Reading[str | None]:
    """Take a string with its quotes; None if it does not end."""
    quote = source.take(1)
    ends, text = Literals([quote]), quote
    while found := (yield from source.read_until(ends, MAX_VALUE)):
        text += "".join(found)
        backslashes = len(found[0]) - len(found[0].rstrip("\\"))
        if backslashes % 2 == 0:
            return text
        if len(text) > MAX_VALUE:
            return None
    return None


def _as_json(text: str) -> str:
    """A Python or JSON literal as JSON; what is neither becomes a string."""
    for read in (ast.literal_eval, json.loads):
        try:
            return json.dumps(read(text), ensure_ascii=False)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    return json.dumps(text, ensure_ascii=False)
