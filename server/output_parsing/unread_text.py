"""The text of an answer: what of it is unread, what is looked for in it, and the parts that it is read as.

A parser is a generator that takes text from an `UnreadText` and stops with `yield` where it needs more.
Special tokens are single characters of a range that no text has: so a marker is told from text that looks
like it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

import msgspec

from server.output_parsing.json_span import JsonSpan
from server.text.characters import whole_characters

SPACE = " \t\r\n"
MOST_SPACE = 512
"""The most space between parts of markup, and at the end of text that may be followed by markup."""

MAX_VALUE = 64 << 10
"""The most characters of a value that has to be complete before it can be passed on."""

T = TypeVar("T")
Parse = Generator[None, None, T]
"""A parser under way: it yields when it needs more text, and returns what it has found."""


class Literals:
    """Some literals, one of which may come next."""

    def __init__(self, literals: Iterable[str]) -> None:
        self._all = sorted(set(literals), key=len, reverse=True)
        self._first = re.compile("|".join(map(re.escape, self._all))) if self._all else None
        self._beginnings = {each[:length] for each in self._all for length in range(1, len(each))}
        self.longest = max(map(len, self._all), default=0)

    def first_in(self, text: str) -> re.Match[str] | None:
        """The first literal in the text; of those that begin at one place, the longest."""
        return self._first.search(text) if self._first else None

    def may_grow(self, found: re.Match[str]) -> bool:
        """Whether a longer literal may begin where this one does, of which the text has the beginning."""
        return found.string[found.start() :] in self._beginnings

    def undecided(self, text: str) -> int:
        """The length of the longest end of the text with which a literal may begin."""
        for length in range(min(self.longest - 1, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0


class UnreadText:
    """Text that is read from its beginning, and can be put back as long as nobody knows what it is."""

    def __init__(self) -> None:
        self.text = ""
        """What has come and is not read yet."""
        self.total = 0
        """The number of characters that have come."""
        self.ended = False
        """Whether nothing more will come."""
        self.broke_off = False
        """Whether the answer has ended where a parser needed more of it."""
        self._read: list[str] | None = None

    @property
    def place(self) -> int:
        """The number of characters that are read."""
        return self.total - len(self.text)

    def push(self, text: str) -> None:
        self.text += text
        self.total += len(text)

    def take(self, length: int) -> str:
        taken, self.text = self.text[:length], self.text[length:]
        if self._read is not None:
            self._read.append(taken)
        return taken

    def give_back(self, text: str) -> None:
        """Put back the end of what was read last, to be read as something else."""
        self.text = text + self.text
        if self._read:
            self._read[-1] = self._read[-1].removesuffix(text)

    @property
    def remembers(self) -> bool:
        """Whether what was read last can be put back."""
        return self._read is not None

    def remember(self, read: str = "") -> None:
        """Keep what is read from now on, and what was `read` last, so that it can be put back."""
        self._read = [read]

    def forget(self) -> None:
        self._read = None

    def put_back(self) -> None:
        """Put back what was read since `remember`."""
        self.text = "".join(self._read or ()) + self.text
        self._read = None

    def drop(self) -> None:
        """Take all that has come, and what could be put back, and make nothing of it."""
        self.text = ""
        self._read = None

    def pass_until(
        self, literals: Literals, emit: Callable[[str], None], *, in_markup: bool = False
    ) -> Parse[str | None]:
        """Pass text on up to the first literal, which is taken and returned; None at the end of the answer.

        `in_markup`: a literal is due, so that an end with which one may begin is not passed on.
        """
        while True:
            found = literals.first_in(self.text)
            if found and (self.ended or not literals.may_grow(found)):
                if found.start():
                    emit(self.take(found.start()))
                return self.take(len(found.group()))
            keep = literals.undecided(self.text) if in_markup or not self.ended else 0
            if passed := self.take(len(self.text) - keep):
                emit(passed)
            if self.ended:
                self.broke_off = True
                return None
            yield

    def read_until(
        self, literals: Literals, most: int, fits: Callable[[str], bool] | None = None
    ) -> Parse[tuple[str, str] | None]:
        """Take text up to a literal, and the literal; None if it does not come within `most` characters.

        `fits` says whether a beginning of the text may be right, so that what is wrong is told early.
        """
        while True:
            found = literals.first_in(self.text)
            if found and not self.ended and literals.may_grow(found):
                yield
                continue
            if found and found.start() <= most:
                before = self.take(found.start())
                return before, self.take(len(found.group()))
            if found or len(self.text) > most + literals.longest:
                return None
            if fits and not fits(self.text[: len(self.text) - literals.undecided(self.text)]):
                return None
            if self.ended:
                self.broke_off = True
                return None
            yield

    def expect(self, *literals: str, skip: str = SPACE) -> Parse[str | None]:
        """Take the first of these literals that is next, behind characters of `skip`; None if none is."""
        while True:
            start = len(self.text) - len(self.text.lstrip(skip))
            if start > MOST_SPACE:
                return None
            undecided = False
            for literal in literals:
                if self.text.startswith(literal, start):
                    self.take(start + len(literal))
                    return literal
                if undecided := literal.startswith(self.text[start:]):
                    break  # an earlier literal wins if it comes
            if not undecided:
                return None
            if self.ended:
                self.broke_off = True
                return None
            yield

    def is_next(self, *literals: str) -> Parse[bool]:
        """Whether one of these literals is next behind space, or the answer ends before another can be."""
        while True:
            rest = self.text.lstrip(SPACE)
            if rest.startswith(literals):
                return True
            may_come = any(literal.startswith(rest) for literal in literals)
            if self.ended or not may_come:
                return may_come
            yield

    def peek(self, skip: str = SPACE) -> Parse[str]:
        """Take characters of `skip`, and return the next one, which is not taken; empty at the end."""
        while True:
            self.take(len(self.text) - len(self.text.lstrip(skip)))
            if self.text:
                return self.text[:1]
            if self.ended:
                self.broke_off = True
                return ""
            yield


_STRING_ENDS = {quote: Literals([quote]) for quote in ('"', "'")}
_ESCAPE_OR_QUOTE = re.compile(r'\\.|"', re.DOTALL)


def pass_json(unread: UnreadText, emit: Callable[[str], None]) -> Parse[str]:
    """Pass one JSON object or array on, piece by piece, but for the bracket that ends it, which is returned.

    Returns "" if none comes, or it does not end.
    """
    if (yield from unread.peek()) not in ("{", "["):
        return ""
    span = JsonSpan()
    while True:
        end = span.end_in(unread.text)
        if piece := unread.take(len(unread.text) if end is None else end - 1):
            emit(span.mended(piece))
        if end is not None:
            return unread.take(1)
        if unread.ended:
            unread.broke_off = True
            return ""
        yield


def read_string(unread: UnreadText) -> Parse[str | None]:
    """Take a JSON string, which may have Python's quotes; None if none comes."""
    if not (quote := (yield from unread.expect(*_STRING_ENDS))):
        return None
    text = ""
    while found := (yield from unread.read_until(_STRING_ENDS[quote], MAX_VALUE)):
        text += found[0]
        backslashes = len(text) - len(text.rstrip("\\"))
        if backslashes % 2 == 0:
            return _decoded(text if quote == '"' else _ESCAPE_OR_QUOTE.sub(_in_json, text))
        text += quote
        if len(text) > MAX_VALUE:
            return None
    return None


def _in_json(found: re.Match[str]) -> str:
    """An escape or a quote between single quotes, as it is written between double ones."""
    return {"\\'": "'", '"': '\\"'}.get(found[0], found[0])


def _decoded(text: str) -> str | None:
    try:
        return whole_characters(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return None


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
        self,
        kind: type[Text] | type[Reasoning],
        parts: list[AnswerPart],
        written: dict[int, str],
        *,
        keeps_space: bool = False,
    ) -> None:
        """`parts` gets what is passed; `written` is the text of each mark that stands for a special token.

        `keeps_space`: only space with a newline in it, or beside nothing else, belongs to the markup.
        """
        self._kind = kind
        self._keeps_space = keeps_space
        self._parts = parts
        self._written = written
        self._space = ""
        self._most_space = MOST_SPACE
        self._follows_markup = False
        self.is_empty = True

    def push(self, text: str) -> None:
        bare = text.rstrip()
        if bare:
            passed = self._space + bare
            if self._follows_markup:
                inner = passed.lstrip()
                if self.is_empty or not self._keeps_space or "\n" in passed[: -len(inner)]:
                    passed = inner
                self._follows_markup = False
            self.is_empty = False
            self._parts.append(self._kind(passed.translate(self._written)))
            self._space, self._most_space = text[len(bare) :], MOST_SPACE
        else:
            self._space += text
        if len(self._space) > self._most_space and not self._follows_markup:
            self.end()
            self._most_space = 0  # the rest of this space is text too

    def skip_space(self) -> None:
        """Note that there is markup here, to which space at both sides may belong."""
        if self._keeps_space and not self.is_empty and "\n" not in self._space:
            self.end()
        self._space = ""
        self._follows_markup = True

    def end(self) -> None:
        """Pass the space on that came last, because no markup follows it."""
        if self._space and not self._follows_markup:
            self._parts.append(self._kind(self._space))
        self._space = ""
