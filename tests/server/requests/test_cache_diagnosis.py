"""A miss in the client's terms: the message, the request's own text, the advice."""

from typing import get_args

import pytest
from fake_frontend import TEMPLATE, byte_tokenizer

from engine_core.protocol import CacheMiss
from engine_core.reason_codes import MissReason
from server.api.messages import Message
from server.requests.cache_diagnosis import ADVICE, MissedPrompt, explain_miss, message_at
from server.text.chat_template import ChatTemplate

TALK = [
    Message(role="system", content="Be brief."),
    Message(role="user", content="hi"),
    Message(role="assistant", content="hi"),
    Message(role="user", content="And now?"),
]
TEXT = ChatTemplate({"default": TEMPLATE}, {}).render([one.for_template() for one in TALK])


def explained(matched: int, reason: MissReason = "different_token", **changes: object):
    asked = MissedPrompt(**{"tokens": list(TEXT.encode()), "text": TEXT, "messages": TALK, **changes})  # pyright: ignore[reportArgumentType]
    return explain_miss(asked, CacheMiss(reason, matched), 16, byte_tokenizer(), 16)


@pytest.mark.parametrize(
    "place, message",
    [
        ("<system>", 0),
        ("Be brief.", 0),
        ("\n<user>hi", 0),  # where the first content ends: a longer one would have stood there
        ("<user>hi", 1),
        ("hi\n<assistant>", 1),
        ("<assistant>hi", 2),
        ("hi\n<user>And", 2),
        ("And now?", 3),
        ("now?", 3),
        ("\n<assistant>", None),
    ],
)
def test_the_message_of_each_place_is_found(place: str, message: int | None) -> None:
    at = TEXT.rindex(place) if place == "\n<assistant>" else TEXT.index(place)
    if place == "\n<assistant>":
        at += 1  # the template's own text
    found = explained(at)
    assert found.message == message
    assert found.role == (None if message is None else TALK[message].role)


def test_text_around_is_the_requests_own() -> None:
    at = TEXT.index("now?")
    assert explained(at).text_around == TEXT[at - 8 : at + 16]


def test_special_tokens_before_the_text_do_not_move_the_place() -> None:
    at = TEXT.index("hi")
    found = explained(at + 1, tokens=[257, *TEXT.encode()])
    assert (found.message, found.matched_tokens) == (1, at + 1)


def test_what_a_template_writes_belongs_to_no_message() -> None:
    tools = "x" * 100
    text = f"<tools>{tools}</tools><user>hi\n"
    assert message_at(text.index("xx"), text, ["hi"]) is None
    assert message_at(text.index("<user>"), text, ["hi"]) == 0
    found = explained(9, tokens=list(text.encode()), text=text, messages=[Message(role="user", content="hi")])
    assert "The chat template writes this place" in found.advice


def test_a_content_that_is_not_found_has_the_gap_where_it_should_be() -> None:
    text = "<user>hi\n<assistant>CALL()\n<tool>ok\n"
    assert message_at(text.index("CALL"), text, ["hi", "", "ok"]) == 1
    assert message_at(text.index("ok"), text, ["hi", "", "ok"]) == 2


def test_a_cut_prompt_is_said_to_be_truncated() -> None:
    found = explained(3, cut_left=True, text=None)
    assert (found.reason, found.message, found.text_around[:3]) == ("truncated", None, TEXT[:3])
    assert explained(16, "evicted", cut_left=True, text=None).reason == "evicted"


def test_where_nothing_differs_no_place_is_told() -> None:
    for reason in ("evicted", "first_time", "computing", "prompt_logprobs"):
        found = explained(16, reason)
        assert (found.message, found.role, found.text_around) == (None, None, "")
    assert explained(len(TEXT), "last_token").text_around == ""


def test_every_reason_has_advice() -> None:
    assert set(ADVICE) == {*get_args(MissReason), "truncated"}
    assert "more than 16 tokens" in explained(0, "short_prompt").advice
