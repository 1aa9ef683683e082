"""Writes an answer as items that follow one another, and as the events that tell of them.

Whole answers are made of the same events, which nobody then sends: so both say the same, under the same ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Generic, Literal, TypeVar

import msgspec

from server.errors import ApiError
from server.frontend.asks.parts import ConversationHead, End, Part
from server.http.sse import StreamForm
from server.output_parsing.unread_text import AnswerPart, Arguments, CallBegun, CallEnded, Reasoning, Text

Kind = Literal["text", "reasoning", "call"]
Item = TypeVar("Item")


class TextTokens(Generic[Item]):
    """What is told of tokens of which no text has come yet, and the characters of each."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Item, int]] = []

    def add(self, entries: Iterable[Item], widths: Iterable[int]) -> None:
        self._waiting += zip(entries, widths, strict=True)

    def clear(self) -> None:
        self._waiting.clear()

    def take(self, text: str) -> list[Item]:
        """The entries of the tokens that came last and make up this text. Markup was before them."""
        waiting, self._waiting = self._waiting, []
        first, missing = len(waiting), len(text)
        # A token without characters begins one that the tokens behind it complete.
        while first and (missing > 0 or not waiting[first - 1][1]):
            first -= 1
            missing -= waiting[first][1]
        return [entry for entry, _ in waiting[first:]]


class OpenItem(ABC, Generic[Item]):
    """An item while it is written."""

    kind: Kind

    @abstractmethod
    def begin(self) -> None:
        """Tell that it begins."""

    @abstractmethod
    def push(self, text: str) -> None:
        """Add text, reasoning, or arguments of a call, and tell of them."""

    @abstractmethod
    def end(self, status: str) -> Item:
        """Tell that it is done, and return it."""


class EventWriter(ABC, Generic[Item]):
    """Writes one answer."""

    ping = b""
    """What is sent during silences."""

    def __init__(
        self, head: ConversationHead, new_call_id: Callable[[], str], *, shows_output: bool = True
    ) -> None:
        self.ended = False
        self.items: list[Item] = []
        """The items that are done."""
        self._head = head
        self._counts = head.counts_before
        self._new_call_id = new_call_id
        self._shows_output = shows_output
        self._begun = False
        self._open: OpenItem[Item] | None = None
        self._events: list[bytes] = []

    @property
    def form(self) -> StreamForm:
        return StreamForm(lambda data: self.ended, self.failed, self.ping)

    def push(self, part: Part) -> bytes:
        """The events that a part makes."""
        self._counts = part.counts
        if not self._begun:
            self._begun = True
            self._begin()
        for said in part.said if self._shows_output else ():
            self._write(said)
        if part.delta.finish_reason is not None:
            if self._open is None and not self.items and self._shows_output:
                self._continue("text", "")
            self._finish(part)
            self.ended = True
        return self._take_events()

    def last_events(self, end: End) -> bytes:
        """The events that are made when nothing more can change."""
        return b""

    def take(self, parts: list[Part]) -> None:
        for part in parts:
            self.push(part)

    @property
    @abstractmethod
    def answer(self) -> msgspec.Struct:
        """The whole answer, once it has ended."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """The events that end a stream which breaks off."""

    @abstractmethod
    def _begin(self) -> None:
        """Tell that the answer begins."""

    @abstractmethod
    def _finish(self, part: Part) -> None:
        """Close the open item, and tell that the answer has ended with this part."""

    @abstractmethod
    def _new_text(self, kind: Kind) -> OpenItem[Item]:
        """A new item of text or of reasoning."""

    @abstractmethod
    def _new_call(self, name: str, id: str) -> OpenItem[Item]:
        """A new call of the tool that the model knows by this name."""

    def _take_events(self) -> bytes:
        taken = b"".join(self._events)
        self._events.clear()
        return taken

    def _write(self, part: AnswerPart) -> None:
        match part:
            case Text(text):
                self._continue("text", text)
            case Reasoning(text):
                self._continue("reasoning", text)
            case CallBegun(_, name, id):
                self._close()
                self._begin_item(self._new_call(name, id or self._new_call_id()))
            case Arguments(_, text):
                if self._open is not None:
                    self._open.push(text)
            case CallEnded():
                self._close()

    def _continue(self, kind: Kind, text: str) -> None:
        if self._open is None or self._open.kind != kind:
            self._close()
            self._begin_item(self._new_text(kind)).push(text)
        else:
            self._open.push(text)

    def _begin_item(self, item: OpenItem[Item]) -> OpenItem[Item]:
        self._open = item
        item.begin()
        return item

    def _close(self, status: str = "completed") -> None:
        if self._open is not None:
            item, self._open = self._open.end(status), None
            self.items.append(item)
