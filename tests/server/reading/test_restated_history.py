"""Conversations in simpler forms, for templates that refuse what a model or its tools have written."""

from __future__ import annotations

from typing import Any

import pytest

from server.errors import BadRequest
from server.media.prompt import Written
from server.reading.restated_history import as_texts, fit_media, with_short_ids, write_restated
from server.schemas.messages import Message
from server.text.chat_template import ChatTemplate

MISTRAL = (
    "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]"
    "{% set messages = messages[1:] %}{% endif %}{% set n = namespace(i=0) %}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('system comes first') }}{% endif %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (n.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set n.i = n.i + 1 %}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% if c.id is not defined or c.id | length != 9 %}"
    "{{ raise_exception('ids have 9 characters') }}{% endif %}<{{ c.function.name }}#{{ c.id }}>{% endfor %}"
    "{% if m.role == 'tool' and m.tool_call_id | length != 9 %}{{ raise_exception('an id') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }}{{ m.tool_call_id }};{% endfor %}"
)
USER = {"role": "user", "content": "hi"}
PICTURE = {"type": "image_url", "image_url": "u"}


def call(*ids: str | None) -> dict[str, Any]:
    calls = [{"id": id, "function": {"name": "f", "arguments": {"a": "é"}}} for id in ids]
    return {"role": "assistant", "tool_calls": calls}


def result(id: str | None, content: Any = "ok") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


def messages(*said: dict[str, Any]) -> list[Message]:
    return [Message.model_validate(each) for each in said]


def written(*said: dict[str, Any], template: str = MISTRAL) -> Written:
    chat = ChatTemplate({"default": template}, {})

    def write(shown: list[Message]) -> Written:
        return Written(chat.render([each.for_template() for each in shown], add_generation_prompt=False))

    return write_restated(messages(*said), chat, None, write)


def test_a_template_that_takes_a_conversation_gets_it_as_it_is() -> None:
    found = written(USER, call("abcdefghi"), result("abcdefghi"))
    assert found.text == "u:hi;<f#abcdefghi>a:;t:okabcdefghi;" and found.notes == []


def test_ids_are_those_that_the_template_takes() -> None:
    found = written(USER, call("call_1", None), result("call_1", "one"), result(None, "two"))
    assert found.text == "u:hi;<f#000000001><f#000000002>a:;t:one000000001;t:two000000002;"
    assert len(found.notes) == 1


def test_arguments_are_texts_where_the_template_wants_such() -> None:
    calls = "{% for c in m.tool_calls %}{{ '>' + c.function.arguments }}{% endfor %}"
    adds = "{% for m in messages %}" + calls + "{% endfor %}"
    found = written(USER, call("a"), template=adds)
    assert found.text == '>{"a": "é"}' and found.notes == []


def test_what_no_form_of_calls_can_show_is_text() -> None:
    found = written(call("a"), USER, USER, result("b", "late"), {"role": "assistant", "content": "so"})
    assert found.text == (
        'u:;a:{"name": "f", "arguments": {"a": "é"}};u:hi\n\nhi\n\nResult of a tool:\nlate;a:so;'
    )
    assert "as text" in found.notes[0]


def test_calls_and_results_have_the_markers_that_a_model_without_its_own_is_told() -> None:
    said = as_texts(messages(USER, call("a", "b"), result("a"), result("b", [PICTURE]), USER), marked=True)
    assert [(each.role, each.tool_calls) for each in said] == [
        (role, None) for role in ("user", "assistant", "user")
    ]
    one = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
    assert said[1].text() == f"{one}\n{one}"
    texts = ("<tool_response>\nok\n</tool_response>", "<tool_response>", "</tool_response>", "hi")
    first, opens, closes, last = ({"type": "text", "text": text} for text in texts)
    assert said[2].content == [first, opens, PICTURE, closes, last]


def test_a_system_in_the_midst_joins_the_first_where_it_would_be_refused() -> None:
    assert written(USER, {"role": "system", "content": "be"}).text == "[be]u:hi;"


def test_what_only_users_have_written_is_refused_as_it_is() -> None:
    with pytest.raises(BadRequest, match="roles must alternate"):
        written(USER, USER)


def test_a_template_that_refuses_all_says_why() -> None:
    with pytest.raises(BadRequest, match="never"):
        written(USER, call("a"), template="{{ raise_exception('never') }}")


def test_a_result_is_that_of_the_first_open_call() -> None:
    said = with_short_ids(messages(result("x"), call("a", "a"), result("a"), result("b"), result("a")))
    ids = [message.tool_call_id for message in said if message.role == "tool"]
    assert ids == ["000000001", "000000003", "000000002", "000000003"]


def test_texts_of_the_same_role_are_one_message() -> None:
    said = as_texts(messages(USER, result("a", [PICTURE, {"type": "text", "text": "seen"}])))
    assert [(each.role, each.content) for each in said] == [("user", "hi\n\nResult of a tool:\nseen")]


def test_the_oldest_media_of_tools_give_way() -> None:
    user = {"role": "user", "content": [PICTURE]}
    said = messages(user, result("a", [PICTURE, PICTURE]), result("b", [PICTURE]))
    fitted, left_out = fit_media(said, {"image": 3})
    gone = {"type": "text", "text": "(image left out)"}
    assert left_out == 1 and [each.content for each in fitted] == [[PICTURE], [gone, PICTURE], [PICTURE]]
    assert fit_media(said, {"image": 4}) == (said, 0)
