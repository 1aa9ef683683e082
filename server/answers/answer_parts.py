"""The parts of an answer: what a model wrote, read as reasoning, text and tool calls."""

from __future__ import annotations

import msgspec

from server.answers.unread_text import MOST_SPACE


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """More of the thinking that comes before an answer."""

    text: str


class Text(msgspec.Struct, frozen=True, gc=False):
    """More of the answer's text."""

    text: str


class CallBegun(msgspec.Struct, frozen=True, gc=False):
    """A tool call whose name is known. Its arguments follow, then `CallEnded`; calls never interleave."""

    index: int
    """The number of the call in its answer, from 0."""
    name: str
    id: str = ""
    """The id that the model wrote, if its format has one."""


class Arguments(msgspec.Struct, frozen=True, gc=False):
    """More of the arguments of the call that has begun, as JSON text."""

    index: int
    text: str


class CallEnded(msgspec.Struct, frozen=True, gc=False):
    index: int


AnswerPart = Reasoning | Text | CallBegun | Arguments | CallEnded


class TextSegment:
    """A run of text or of reasoning: space at its ends belongs to the markup around it, not to it."""

    def __init__(
        self, kind: type[Text] | type[Reasoning], parts: list[AnswerPart], written: dict[int, str]
    ) -> None:
        """`parts` gets what is passed; `written` is the text of each mark that stands for a special token."""
        self._kind = kind
        self._parts = parts
        self._written = written
        self._space = ""
        self._skips_space = False
        self.is_empty = True

    def push(self, text: str) -> None:
        if self._skips_space:
            text = text.lstrip()
            if not text:
                return
            self._skips_space = False
        bare = text.rstrip()
        if bare:
            self.is_empty = False
            self._parts.append(self._kind((self._space + bare).translate(self._written)))
            self._space = text[len(bare) :]
        else:
            self._space += text
            if len(self._space) > MOST_SPACE:
                self.end()

    def skip_space(self) -> None:
        """Let what comes next begin behind its space, and drop the space that came last."""
        self._space = ""
        self._skips_space = True

    def end(self) -> None:
        """Pass the space on that came last, because no markup follows it."""
        if self._space:
            self._parts.append(self._kind(self._space))
            self._space = ""
