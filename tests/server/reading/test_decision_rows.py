"""Rows of decision models with a head: what is written of a text, and what cannot be."""

from typing import Any

import pytest

from server.errors import BadRequest
from server.reading.decision_rows import HeadRows
from server.requests.decisions import predicate


class Spelled:
    """A tokenizer with a token for each character, behind some control tokens."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def token_id(self, name: str) -> int | None:
        return self._names.index(name) if name in self._names else None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [*map(ord, text)]


MARKS: Any = ("<|fim_prefix|>", "<|fim_middle|>", "<|box_start|>", "<|box_end|>", "<|fim_suffix|>")


def rows(*names: str) -> HeadRows:
    tokenizer: Any = Spelled(*names)
    return HeadRows(tokenizer)


def shown(ids: list[int]) -> str:
    return "".join("<~[]>"[id] if id < len(MARKS) else chr(id) for id in ids)


def test_a_predicate_has_no_and_yes_between_marks() -> None:
    question = predicate(None, "Is it?", yes="it is")
    assert shown(rows(*MARKS).question(question, (1, 0))) == "~Is it?[no][yes: it is]>"


def test_a_conversation_is_written_with_roles_and_a_text_without() -> None:
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<|box_end|>"}]
    assert shown(rows(*MARKS).state(said[:1], "input")) == "<Hi"
    assert shown(rows(*MARKS).state(said, "input")) == "<user: Hi\nassistant: <\u00a6box_end\u00a6>"


def test_what_such_a_model_cannot_read_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"does not have all of <\|fim_prefix\|>, "):
        rows(*MARKS[1:])
    with pytest.raises(BadRequest, match="reads texts alone: give `input` without pictures"):
        rows(*MARKS).state([{"role": "user", "content": [{"type": "image_url"}]}], "input")
