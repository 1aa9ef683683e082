"""Writes a text and a question as the rows on which decision models with a head for options were trained.

They are Kev's: the text and the question stand between control tokens, which no client's text can hold, and
so does each option. There is no chat template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from server.errors import BadRequest
from server.requests.decisions import Option, Question
from server.text.tokenizer import Tokenizer

_MARKS = ("<|fim_prefix|>", "<|fim_middle|>", "<|box_start|>", "<|box_end|>", "<|fim_suffix|>")
"""What begins the text, the question and an option, and what ends an option and the row."""
_CONTROL = re.compile(r"<\|([A-Za-z0-9_]+)\|>")


class HeadRows:
    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises BadRequest if the model does not have the tokens."""
        self._tokenizer = tokenizer
        found = [tokenizer.token_id(mark) for mark in _MARKS]
        self._marks = [id for id in found if id is not None]
        if len(self._marks) < len(_MARKS):
            raise BadRequest(f"The model's tokenizer does not have all of {', '.join(_MARKS)}.")

    def state(self, messages: Sequence[Mapping[str, Any]], field: str) -> list[int]:
        """The tokens of the text with which all rows begin, or of the messages of a conversation."""
        said = list[str]()
        for each in messages:
            if not isinstance(content := each.get("content"), str):
                raise BadRequest(
                    f"This model reads texts alone: give `{field}` without pictures and calls.", field
                )
            said.append(content if len(messages) == 1 else f"{each['role']}: {content}")
        return [self._marks[0], *self._encode("\n".join(said))]

    def question(self, question: Question, order: Sequence[int]) -> list[int]:
        """The tokens of a question behind the text, with its options in this order."""
        _, begins, opens, closes, ends = self._marks
        ids, lower = [begins, *self._encode(question.text)], question.kind == "predicate"
        for at in order:
            ids += [opens, *self._encode(_said(question.options[at], lower=lower)), closes]
        return [*ids, ends]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(_CONTROL.sub("<\u00a6\\1\u00a6>", text), add_special_tokens=False)


def _said(option: Option, *, lower: bool) -> str:
    text = option.text.lower() if lower else option.text
    return f"{text}: {option.description}" if option.description else text
