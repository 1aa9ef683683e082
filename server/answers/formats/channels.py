"""Calls as messages to a function, in a channel of gpt-oss: `<|channel|>commentary to=functions.f ...`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from server.answers.calls import MAX_NAME, Calls, pass_json
from server.answers.source import Literals, Reading
from server.grammars.tool_grammar import Lark, ToolForm

_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
"""The recipient in a message's header, where special tokens are written out."""


@dataclass(frozen=True, slots=True)
class Channels:
    """One message is one call. Its header has the recipient before or behind the channel's name."""

    header_ends: str
    """What stands between the header and the arguments."""
    constrains: str
    """What a header says of the form of the arguments."""
    ends: tuple[str, ...]
    """What ends the message."""

    def holds_several(self, opener: str) -> bool:
        return False

    def write(self, lark: Lark, tools: Sequence[ToolForm], opener: str, several: bool) -> str:
        recipient = "functions." if opener.endswith("to=") else ""
        calls = (
            lark.sequence(
                lark.literal(recipient + tool.name + self.constrains + self.header_ends),
                lark.json(tool.schema, strict=tool.strict),
            )
            for tool in tools
        )
        return lark.one_of(calls)

    def read(self, calls: Calls, opener: str) -> Reading[None]:
        source = calls.source
        found = yield from source.read_until(Literals((self.header_ends,)), MAX_NAME)
        if found is None:
            return
        recipient = _RECIPIENT.search(calls.as_written(opener + found[0]))
        if recipient is None or not calls.begin(recipient.group(1)):
            return
        if (yield from pass_json(source, calls.argue)):
            calls.end()
            yield from source.expect(*self.ends)
