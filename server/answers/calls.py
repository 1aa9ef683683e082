"""What the reader of a call knows and does: the text to read, the names that exist, the parts it gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from server.answers.json_span import JsonSpan
from server.answers.parts import Arguments, CallBegun, CallEnded, Part
from server.answers.source import Literals, Reading, Source

MAX_NAME = 256
"""The most characters of a name with what surrounds it: more is text."""
MAX_VALUE = 64 << 10
"""The most characters of a value that has to be complete before it can be passed on."""

Schema = Mapping[str, Any]

_STRING_ENDS = Literals(['"'])


class Calls:
    """The calls of one answer."""

    def __init__(
        self,
        source: Source,
        parts: list[Part],
        tools: Mapping[str, Schema],
        written: Mapping[int, str],
        on_begin: Callable[[], None],
    ) -> None:
        """`written` is the text of each mark that stands for a special token."""
        self.source = source
        self.count = 0
        """The number of calls that have begun."""
        self.schema: Schema = {}
        """The schema of the arguments of the call that began last."""
        self._parts = parts
        self._tools = tools
        self._written = written
        self._on_begin = on_begin

    def begin(self, name: str, id: str = "") -> bool:
        """Begin a call; False if no tool has this name, so that this is no call."""
        if name not in self._tools:
            return False
        self.source.forget()
        self._on_begin()
        self._parts.append(CallBegun(self.count, name, id))
        self.schema = self._tools[name]
        self.count += 1
        return True

    def as_written(self, text: str) -> str:
        """Text in which marks are special tokens again."""
        return text.translate(self._written)

    def argue(self, text: str) -> None:
        """Pass on more of the arguments."""
        if text:
            self._parts.append(Arguments(self.count - 1, text.translate(self._written)))

    def argue_string(self, text: str) -> None:
        """Pass on more of a string, which the format writes without JSON's escapes."""
        self.argue(json.dumps(text.translate(self._written), ensure_ascii=False)[1:-1])

    def end(self) -> None:
        self._parts.append(CallEnded(self.count - 1))


def pass_json(source: Source, emit: Callable[[str], None]) -> Reading[bool]:
    """Pass one JSON object or array on, piece by piece; False if none comes, or it does not end."""
    if (yield from source.peek()) not in ("{", "["):
        return False
    span = JsonSpan()
    while True:
        end = span.end_in(source.text)
        if piece := source.take(len(source.text) if end is None else end):
            emit(piece)
        if end is not None:
            return True
        if source.ended:
            return False
        yield


def read_string(source: Source) -> Reading[str | None]:
    """Take a JSON string; None if none comes."""
    if not (yield from source.expect('"')):
        return None
    text = ""
    while found := (yield from source.read_until(_STRING_ENDS, MAX_VALUE)):
        text += found[0]
        backslashes = len(text) - len(text.rstrip("\\"))
        if backslashes % 2 == 0:
            return _decoded(text)
        text += '"'
        if len(text) > MAX_VALUE:
            return None
    return None


def _decoded(text: str) -> str | None:
    try:
        return json.loads(f'"{text}"', strict=False)
    except ValueError:
        return None
