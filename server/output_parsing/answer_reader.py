"""Reads an answer while it is written: what of it is reasoning, what is text, and which tools it calls.

Nothing is looked at twice but beginnings that may become a marker, so reading is linear, and the parts say
the same however the answer was cut into pieces.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from server.output_parsing.dialect import NO_MARKERS, Dialect, ThinkingMarkers
from server.output_parsing.formats.call_format import ParsedCalls, Schema
from server.output_parsing.unread_text import (
    AnswerPart,
    Literals,
    Parse,
    Reasoning,
    Text,
    TextSegment,
    UnreadText,
)
from server.text.characters import whole_characters

_PIECE = 4096
"""The most characters that are read at a time, because taking from the front of a text copies the rest."""

_INPUT_BEGINS = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_WHOLE_CHARACTERS = re.compile(r'(?:[^"\\]++|\\(?:[^u]|u[0-9a-fA-F]{4}))*+')
"""Characters of a JSON string, with escapes that are complete."""
_HALF_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")
"""The first half of a pair of escapes that are one character."""


class AnswerReader:
    """The reader of one choice."""

    def __init__(
        self,
        dialect: Dialect | None,
        thinking: ThinkingMarkers | None,
        *,
        tools: Mapping[str, Schema] | None,
        is_thinking: bool = False,
        written: Mapping[str, str] | None = None,
        calls_end_thinking: bool = True,
        holds_calls: bool = True,
    ) -> None:
        """`tools`: the schema of the arguments of each tool; None if calls are not to be read.

        `is_thinking`: the prompt has opened the reasoning already. `written`: the text of each mark that
        stands for a special token. `calls_end_thinking`: a call within the reasoning is one, and ends it.
        `holds_calls`: a call passes when it is complete, so that none is told of that breaks off; otherwise
        its arguments pass while they are written.
        """
        self._dialect = None if tools is None else dialect
        self._thinking = thinking = thinking or NO_MARKERS
        self._parts: list[AnswerPart] = []
        self._unread = UnreadText()
        marks = {ord(mark): text for mark, text in (written or {}).items()}
        keeps_space = self._dialect is not None and self._dialect.keeps_space
        self._text = TextSegment(Text, self._parts, marks, keeps_space=keeps_space)
        self._reasoning = TextSegment(Reasoning, self._parts, marks)
        self._calls = ParsedCalls(self._unread, self._parts, tools or {}, marks, self._text.skip_space)
        self._calls.holds = holds_calls
        self._hides = (*(dialect.hides if dialect else ()), *thinking.hides)
        self._closers = self._dialect.format.closers if self._dialect else ()
        self._look_for(written or {}, calls_end_thinking=calls_end_thinking and not thinking.always_closes)
        self._has_called = False
        """Whether calls, or markup that holds none, have been read."""
        self._has_open_text = False
        """Whether an opener that no call follows stands in the text, so that what closes it is text, too."""
        self._explains = False
        """Whether the text has spelled an opener in ordinary characters, so that what follows is no call."""
        self._thoughts: list[slice] = []
        """The places of the reasoning in the answer's text, without markers. The last end may be None."""
        self._starts: list[int] = []
        """The places in the answer's text at which its tokens begin."""
        self._width = 0
        self._reading = self._read(is_thinking)
        next(self._reading)

    def _look_for(self, written: Mapping[str, str], *, calls_end_thinking: bool) -> None:
        """Sets the literals that are looked for in the text and in the reasoning."""
        opens, bare = (self._dialect.opens, self._dialect.opens_bare) if self._dialect else ((), ())
        self._spelled = tuple(text for mark, text in written.items() if bare and mark in opens)
        """Openers that are special tokens, in ordinary characters."""
        self._openers = Literals(
            (*opens, *bare, *self._hides, *self._thinking.opens, *self._closers, *self._spelled)
        )
        answers, then = self._thinking.answers, self._thinking.then
        # What begins an answer ends the reasoning, too, if the model has forgotten what closes it.
        self._closes_thinking = (*self._thinking.closes, *((answers, then + answers) if answers else ()))
        self._thinking_ends = Literals((*(opens if calls_end_thinking else ()), *self._closes_thinking))

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens of reasoning so far, without its markers."""
        count = 0
        for thought in self._thoughts:
            first = bisect_left(self._starts, thought.start)
            last = len(self._starts) if thought.stop is None else bisect_left(self._starts, thought.stop)
            count += last - first
        return count

    @property
    def repairs(self) -> Sequence[str]:
        """What was wrong with calls that were read nonetheless, one entry each."""
        return self._calls.repairs

    def hold_calls(self) -> None:
        """Let calls pass when they are complete, from the first one on."""
        self._calls.holds = True

    def push(self, text: str, widths: Sequence[int] = ()) -> list[AnswerPart]:
        """The parts that this next piece of the answer begins, continues or completes.

        `widths` are the characters of each of its tokens, if tokens shall be counted.
        """
        for width in widths:
            self._starts.append(self._width)
            self._width += width
        for start in range(0, len(text), _PIECE):
            self._unread.push(text[start : start + _PIECE])
            next(self._reading)
        return self._take_parts()

    def finish(self) -> list[AnswerPart]:
        """What was held back, now that the answer has ended."""
        self._unread.ended = True
        next(self._reading, None)
        self._reasoning.end()
        self._text.end()
        return self._take_parts()

    def _take_parts(self) -> list[AnswerPart]:
        parts = self._parts.copy()
        self._parts.clear()
        return parts

    def _read(self, is_thinking: bool) -> Parse[None]:
        yield
        if is_thinking:
            yield from self._think()
        elif (yield from self._unread.expect(*self._thinking.closes)):
            self._text.skip_space()  # its reasoning is empty
        while True:
            opener = yield from self._unread.pass_until(
                self._openers, self._text.push, in_markup=self._has_called
            )
            if opener is None:
                return
            if opener in self._thinking.opens:
                yield from self._think()
            elif opener in self._hides:
                pass
            elif opener in self._spelled:
                self._explains = True
                self._text.push(opener)
            elif opener not in self._closers:
                yield from self._call(opener)
            elif self._has_called and not self._has_open_text:
                self._text.skip_space()  # it ends what is no call any more
            else:
                self._has_open_text = False
                self._text.push(opener)

    def _think(self) -> Parse[None]:
        """Read reasoning up to its end. A call ends it too, even without its marker."""
        in_text = self._thinking.in_text
        segment = self._text if in_text else self._reasoning
        if in_text:
            segment.push(self._thinking.opens[0])
        else:
            self._text.skip_space()
            segment.skip_space()
        yield from self._unread.expect(*self._thinking.opens)  # some models write again what is open
        begin = self._unread.place
        self._thoughts.append(slice(begin, None))
        while True:
            closer = yield from self._unread.pass_until(self._thinking_ends, segment.push)
            if closer is None:
                return
            end = self._unread.place - len(closer)
            if closer in self._closes_thinking:
                if in_text:
                    segment.push(closer)
                break
            if (yield from self._call(closer, segment)):
                break
        self._thoughts[-1] = slice(begin, end)
        self._reasoning.skip_space()

    def _call(self, opener: str, around: TextSegment | None = None) -> Parse[bool]:
        """Read the calls behind an opener. If there is none, it belongs to what is around it."""
        segment = self._text if around is None else around
        dialect, calls, unread = self._dialect, self._calls, self._unread
        may_call = dialect is not None and not (opener in dialect.opens_bare and self._explains)
        if dialect is not None and may_call and (self._text.is_empty or opener not in dialect.only_first):
            unread.remember(opener)
            unread.broke_off, begun = False, calls.count
            if opener not in dialect.only_first and (yield from unread.expect(opener)):
                calls.repair(f"{opener} stands twice")
            yield from dialect.format.read(calls, opener)
            has_begun, is_broken = calls.count > begun, calls.is_open or calls.in_list
            is_marked = has_begun or opener not in dialect.only_first
            if unread.broke_off and is_marked and (is_broken or unread.remembers):
                unread.drop()  # what breaks off is neither a call nor text
            elif is_broken and self._closers:
                yield from unread.pass_until(Literals(self._closers), lambda _: None)
            calls.abandon()
            self._has_called = self._has_called or has_begun or not unread.remembers
            if not unread.remembers:
                return True  # calls, or markup that holds none
            unread.put_back()
            if has_begun:
                return True
            unread.take(len(opener))
        segment.push(opener)
        self._has_open_text = around is None
        return False


class CustomToolInput:
    """The free text of a custom tool, which the model writes as the one string of its arguments.

    It comes from pieces of the arguments as JSON. What is in another form comes at the end, as it is.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._unread = ""
        """The end of the arguments that is not read yet."""
        self._has_begun = False

    @property
    def text(self) -> str:
        """What has been read of the text."""
        return "".join(self._pieces)

    def push(self, arguments: str) -> str:
        """More of the text, of these further arguments."""
        self._unread += arguments
        if not self._has_begun:
            if (begin := _INPUT_BEGINS.match(self._unread)) is None:
                return ""
            self._unread, self._has_begun = self._unread[begin.end() :], True
        found = _WHOLE_CHARACTERS.match(self._unread)
        raw = found.group() if found else ""
        next_two = self._unread[len(raw) : len(raw) + 2]
        if (half := _HALF_PAIR.search(raw)) and "\\u".startswith(next_two):
            raw = raw[: half.start()]  # the other half may come
        self._unread = self._unread[len(raw) :]
        return self._add(json.loads(f'"{raw}"', strict=False))

    def end(self) -> str:
        """The rest of the text, now that the arguments have ended."""
        if self._has_begun:
            return ""
        try:
            found = json.loads(self._unread)
        except ValueError:
            return self._add(self._unread)
        text = found.get("input") if isinstance(found, dict) else found
        return self._add(text if isinstance(text, str) else self._unread)

    def _add(self, text: str) -> str:
        text = whole_characters(text)
        self._pieces.append(text)
        return text
