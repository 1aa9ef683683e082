"""What helper processes do for a frontend, done in this process by what they would send and receive."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from server.grammar_checks.grammar_job import AskedGrammar, check
from server.grammars.response_format import AnswerGrammar
from server.media.prompt import NO_MEDIA, LaidMedia
from server.model_facts import Facts
from server.reading.body_job import Answer, read_body
from server.reading.body_table import BY_NAME, Reading
from server.reading.long_bodies import ReadBody, opened
from server.reading.reading_context import ReadingContext

R = TypeVar("R")


class FakeGrammars:
    """Checks grammars in this process, by what the real one sends and receives."""

    def __init__(self, checked: list[AskedGrammar]) -> None:
        self._checked = checked

    async def check(self, asked: AskedGrammar, owner: str = "") -> AnswerGrammar:
        self._checked.append(asked)
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=AskedGrammar)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(check(sent, {})), type=AnswerGrammar)


class FakeLongBodies:
    """Reads long bodies in this process, but sends and receives what helper processes would."""

    def __init__(self, reader: ReadingContext, asked: list[str]) -> None:
        self._reader = reader
        self._asked = asked

    async def read(
        self, reading: Reading[R], raw: bytes, facts: Facts, media: LaidMedia = NO_MEDIA, owner: str = ""
    ) -> ReadBody[R]:
        self._asked.append(reading.name)
        facts = msgspec.msgpack.decode(msgspec.msgpack.encode(facts), type=Facts)
        reader = ReadingContext(facts, self._reader.tokenizer, self._reader.options, media)
        sent = msgspec.msgpack.encode(read_body(BY_NAME[reading.name], raw, reader))
        return opened(reading, msgspec.msgpack.decode(sent, type=Answer))
