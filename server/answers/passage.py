"""A run of text or of reasoning: space at its ends belongs to the markup around it, not to it."""

from __future__ import annotations

from server.answers.parts import Part, Reasoning, Text
from server.answers.source import MOST_SPACE


class Passage:
    def __init__(
        self, kind: type[Text] | type[Reasoning], parts: list[Part], written: dict[int, str]
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
