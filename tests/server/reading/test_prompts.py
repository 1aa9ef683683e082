"""What the system says in a conversation, arranged for the template that will write it."""

import pytest

from server.reading.system_messages import arranged, tell_tools
from server.schemas.messages import Message, Tool
from server.text.chat_template import ChatTemplate

ANYWHERE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FIRST_ONLY = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}"
    "{% endif %}{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
NO_SYSTEM = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}"
DEVELOPER = "{% for m in messages %}{{ '<developer>' if m.role == 'developer' else m.role }}{% endfor %}"


def arrange(template: str, *said: tuple[str, str]) -> list[tuple[str, str]]:
    messages = [Message.model_validate({"role": role, "content": text}) for role, text in said]
    found = arranged(messages, ChatTemplate({"default": template}, {}))
    return [(message.role, message.text()) for message in found]


@pytest.mark.parametrize("template", [ANYWHERE, FIRST_ONLY, STRICT])
def test_those_at_the_beginning_become_one(template: str) -> None:
    said = arrange(template, ("system", "a"), ("developer", "b"), ("user", "c"))
    assert said == [("system", "a\n\nb"), ("user", "c")]


def test_a_late_one_stays_where_the_template_writes_it() -> None:
    said = [("system", "a"), ("user", "b"), ("system", "c"), ("user", "d")]
    assert arrange(ANYWHERE, *said) == said


@pytest.mark.parametrize("template", [FIRST_ONLY, STRICT])
def test_a_late_one_goes_to_the_beginning_where_it_would_be_lost(template: str) -> None:
    said = arrange(template, ("user", "b"), ("developer", "c"), ("user", "d"))
    assert said == [("system", "c"), ("user", "b"), ("user", "d")]
    said = arrange(template, ("system", "a"), ("user", "b"), ("system", "c"))
    assert said == [("system", "a\n\nc"), ("user", "b")]


def test_a_developer_keeps_the_role_where_the_template_knows_it() -> None:
    assert arrange(DEVELOPER, ("developer", "a"), ("user", "b")) == [("developer", "a"), ("user", "b")]


def test_what_needs_no_arrangement_is_left_alone() -> None:
    assert arrange(STRICT, ("user", "a")) == [("user", "a")]


@pytest.mark.parametrize(
    ("template", "said", "role"),
    [
        (ANYWHERE, [("user", "b")], "system"),
        (ANYWHERE, [("system", "a"), ("user", "b")], "system"),
        (NO_SYSTEM, [("user", "b")], "user"),
        (NO_SYSTEM, [("assistant", "b")], "user"),
    ],
)
def test_tools_are_described_where_the_template_writes_it(
    template: str, said: list[tuple[str, str]], role: str
) -> None:
    messages = [Message.model_validate({"role": role, "content": text}) for role, text in said]
    tools = [Tool.model_validate({"function": {"name": "look", "description": "Looks."}})]
    chat = ChatTemplate({"default": template}, {})
    found = tell_tools(messages, tools, chat, must=False, several=True)
    assert found[0].role == role
    written = chat.render([message.for_template() for message in found])
    assert '{"name": "look", "description": "Looks."' in written and said[-1][1] in written


def test_pictures_of_the_system_stay_where_they_are() -> None:
    picture = {"type": "image_url", "image_url": "u"}
    said = [
        Message(role="system", content=[picture, {"type": "text", "text": "a"}]),
        Message(role="system", content="b"),
        Message(role="user", content="c"),
    ]
    [first, _] = arranged(said, ChatTemplate({"default": STRICT}, {}))
    assert first.content == [picture, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
