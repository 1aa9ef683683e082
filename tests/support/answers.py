"""Reads answers in random pieces, collects their parts, and fakes what tells how they are read."""

import random
from dataclasses import dataclass, field
from typing import Any

from server.output_parsing.answer_reader import AnswerReader
from server.output_parsing.unread_text import AnswerPart, Arguments, CallBegun, CallEnded, Reasoning, Text
from server.text.chat_template import ChatTemplate

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"anyOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]},
            "flags": {"type": "object"},
        },
        "$defs": {"count": {"type": "integer"}},
    },
    "stop": {"type": "object", "properties": {}},
}


@dataclass(eq=False)
class FakeTokenizer:
    """What is asked of a tokenizer to find how answers are read."""

    chat: ChatTemplate = field(default_factory=lambda: ChatTemplate({"default": "{{ messages }}"}, {}))
    added_tokens: dict[str, int] = field(default_factory=dict)
    response_template: dict[str, Any] | None = None


@dataclass
class Answer:
    reasoning: str = ""
    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ended: int = 0

    def add(self, parts: list[AnswerPart]) -> None:
        for part in parts:
            match part:
                case Reasoning(text):
                    self.reasoning += text
                case Text(text):
                    self.text += text
                case CallBegun(index, name):
                    assert index == len(self.calls) == self.ended
                    self.calls.append((name, ""))
                case Arguments(index, text):
                    name, before = self.calls[index]
                    self.calls[index] = name, before + text
                case CallEnded(index):
                    assert index == len(self.calls) - 1 == self.ended
                    self.ended += 1


def read(reader: AnswerReader, text: str, cut: random.Random | None = None) -> Answer:
    answer, at = Answer(), 0
    while at < len(text):
        size = cut.choice([1, 1, 2, 3, 7, 30]) if cut else len(text)
        answer.add(reader.push(text[at : at + size]))
        at += size
    answer.add(reader.finish())
    return answer
