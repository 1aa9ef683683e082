"""Chat templates: rendered as transformers renders them, and kept from reaching Python."""

import time
from typing import Any

import pytest

from server.errors import BadRequest
from server.text.chat_template import AnswerStyle, ChatTemplate, compile_template

CHATML = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
USER = {"role": "user", "content": "hi"}


def render(template: str, messages: list[dict[str, Any]] | None = None, **arguments: Any) -> str:
    arguments.setdefault("add_generation_prompt", False)
    return ChatTemplate({"default": template}, {"bos_token": "<s>"}).render(messages or [USER], **arguments)


def refusal(template: str, messages: list[dict[str, Any]] | None = None, **arguments: Any) -> str:
    with pytest.raises(BadRequest) as caught:
        render(template, messages, **arguments)
    return caught.value.message


def test_a_conversation() -> None:
    assert render(CHATML, add_generation_prompt=True) == "<|user|>hi<|end|>\n<|assistant|>"
    assert render("{{ bos_token }}{{ messages[0].content }}") == "<s>hi"


def test_what_transformers_offers_templates() -> None:
    assert render("{{ {'a': 'é', 'b': '<'} | tojson }}") == '{"a": "é", "b": "<"}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert render("{{ strftime_now('%Y') }}").isdigit()
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("a{% generation %}b{{ messages[0].role }}{% endgeneration %}c") == "abuserc"
    assert render("  {% if true %}\n  x\n  {% endif %}\n") == "  x\n"
    assert render("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(1) }}{{ 'a' ~ 1 ~ 'b' }}") == "[1]a1b"
    assert render(
        "{{ 'a b'.split() | join('-') }}{{ '-'.join(['x', 'y']) }}{{ 'aa'.replace('a', 'b') }}"
    ) == ("a-bx-ybb")


def test_tools_documents_and_own_arguments() -> None:
    template = "{{ tools[0].name }}{{ documents[0].text }}{{ mood }}{{ messages | length }}"
    text = render(
        template,
        tools=[{"name": "t"}],
        documents=[{"text": "d"}],
        kwargs={"mood": "calm", "messages": [], "tools": []},
    )
    assert text == "tdcalm1"
    assert render("{{ tools is none }}") == "True"


def test_tool_calls_have_their_arguments_as_objects() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    template = "{{ messages[0].tool_calls[0].function.arguments.x }}"
    assert render(template, [message]) == "1"
    assert call["function"]["arguments"] == '{"x": 1}'


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


def test_parts_are_joined_for_templates_that_want_text() -> None:
    assert render(CHATML, [{"role": "user", "content": PARTS}]) == "<|user|>one\ntwo<|end|>\n"


@pytest.mark.parametrize(
    "loop",
    [
        "{% for part in message.content %}({{ part.text }}){% endfor %}",
        "{% for part in message['content'] | list %}({{ part.text }}){% endfor %}",
        "{% set c = message.content %}{% for part in c %}({{ part.text }}){% endfor %}",
    ],
)
def test_parts_reach_templates_that_loop_over_them(loop: str) -> None:
    template = "{% for message in messages %}" + loop + "{% endfor %}"
    assert compile_template(template).format == "openai"
    assert render(template, [{"role": "user", "content": PARTS}]) == "(one)(two)"
    assert render(template) == "(hi)"


def test_templates_that_take_both_get_what_was_sent() -> None:
    template = (
        "{% for m in messages %}{% if m.content is string %}s:{{ m.content }}"
        "{% else %}{% for part in m.content %}p:{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    assert render(template) == "s:hi"
    assert render(template, [{"role": "user", "content": PARTS}]) == "p:onep:two"


def test_the_operator_may_fix_the_format() -> None:
    chat = ChatTemplate({"default": "{{ messages[0].content }}"}, {}, "openai")
    assert chat.render([USER]) == "[{'type': 'text', 'text': 'hi'}]"


def test_the_final_message_is_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "Sure, "}]
    assert render(CHATML, messages, continue_final_message=True) == "<|user|>hi<|end|>\n<|assistant|>Sure, "
    trimming = "{% for m in messages %}{{ m.content | trim }}<end>{% endfor %}"
    assert render(trimming, messages, continue_final_message=True) == "hi<end>Sure,"
    for empty in ("", "\n"):  # which transformers continues, too
        messages = [USER, {"role": "assistant", "content": empty}]
        assert render(CHATML, messages, continue_final_message=True).endswith(f"<|assistant|>{empty}")
        assert render(trimming, messages, continue_final_message=True) == "hi<end>"
    parts = [USER, {"role": "assistant", "content": PARTS}]
    assert render(CHATML, parts, continue_final_message=True).endswith("<|assistant|>one\ntwo")
    for begun in ("<", "end"):  # which the mark of its end has too
        messages = [USER, {"role": "assistant", "content": begun}]
        assert render(CHATML, messages, continue_final_message=True).endswith(f"<|assistant|>{begun}")


def test_an_answer_that_the_template_does_not_write_stands_behind_what_begins_one() -> None:
    template = (
        "{% for m in messages if m.role == 'user' %}{{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}answer: {% endif %}"
    )
    messages = [USER, {"role": "assistant", "content": "Sure, "}]
    given = {"continue_final_message": True, "add_generation_prompt": False}
    assert render(template, messages, **given) == "hi answer: Sure, "
    assert "does not appear" in refusal(template, messages[1:], **given)


@pytest.mark.parametrize("content", ["", "gone", None])
def test_a_final_message_that_is_not_in_the_text(content: str | None) -> None:
    template = "{% for m in messages %}x{% endfor %}"
    told = refusal(template, [{"role": "assistant", "content": content}], continue_final_message=True)
    assert "final message does not appear" in told


def test_which_template() -> None:
    chat = ChatTemplate({"tool_use": "t"}, {})
    with pytest.raises(BadRequest, match=r"'tool_use'.*--chat-template"):
        chat.render([USER])
    assert chat.render([USER], tools=[{}]) == "t"
    assert chat.render([USER], template="{{ 'mine' }}") == "mine"
    with pytest.raises(BadRequest, match=r"no default chat template.*`input` of /v1/embeddings"):
        ChatTemplate({}, {}).render([USER])


def test_a_template_that_takes_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> str:
        raise MemoryError

    monkeypatch.setattr(compile_template("{{ 0 }}"), "render", broken)
    assert refusal("{{ 0 }}").startswith("The chat template took more memory")


def test_failures_are_the_requests() -> None:
    assert refusal("{{ raise_exception('roles must alternate') }}").endswith("roles must alternate")
    assert "TypeError" in refusal("{{ 1 + 'a' }}")
    assert "undefined" in refusal("{{ nothing.here.at.all }}")
    assert "not valid Jinja" in refusal("{% for %}")
    assert "RecursionError" in refusal("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_templates_cannot_reach_out(template: str) -> None:
    refusal(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ('a' * 100).translate({97: 'b' * 2000000}) }}",
        "{{ 'a'.ljust(2000000000) }}",
        "{{ 'a'.center(2000000000) }}",
        "{{ 'a'.zfill(2000000000) }}",
        "{{ 'a'.expandtabs(2000000000) }}",
        "{{ ('a' | e).ljust(2000000000) }}",
        "{{ 'a'.encode() }}",
        "{{ (1).to_bytes(2000000000) }}",
        "{{ (1.5).hex() }}",
        "{{ true.to_bytes(2000000000) }}",
        "{{ 'a' * 2000000000 }}",
        "{{ 2000000000 * ['a'] }}",
        "{{ 10 ** 2000000000 }}",
        "{{ (10 ** 1000) * (10 ** 1000) }}",
        "{{ [1] | batch(2000000000, 'x') | list }}",
        "{{ [1] | slice(2000000000) | list }}",
        "{{ 'a' | center(2000000000) }}",
        "{{ 'a' | indent(2000000000) }}",
        "{{ 'a' | indent(width=2000000000) }}",
        "{{ [1] | tojson(indent=2000000000) }}",
        "{{ lipsum(2000000000) }}",
        "{% for i in range(2000000000) %}{% endfor %}",
    ],
)
def test_nothing_huge_is_made_in_one_step(template: str) -> None:
    began = time.process_time()
    refusal(template)
    assert time.process_time() - began < 0.2


def test_usual_steps_are_not_bounded() -> None:
    assert render("{{ 'ab' * 3 }}{{ 3 * 4 }}{{ 2 ** 10 }}{{ [1] * 2 }}") == "ababab121024[1, 1]"
    assert render("{{ ' a '.strip().upper().replace('A', 'b') }}{{ 'a,b'.split(',')[1] }}") == "bb"
    assert render("{{ 'a' | indent(2, true) }}{{ [1, 2, 3] | batch(2) | list }}") == "  a[[1, 2], [3]]"
    assert render("{{ '%s-%d' | format('a', 1) }}{{ 'x{}'.format(1) }}{{ 7 % 4 }}") == "a-1x13"


@pytest.mark.parametrize(
    "template", ["{% if 1 %}" * 300 + "{% endif %}" * 300, "{{ " + "(" * 5000 + ")" * 5000]
)
def test_a_template_that_cannot_be_compiled(template: str) -> None:
    assert "compiled" in refusal(template) or "not valid Jinja" in refusal(template)


QWEN, DEEPSEEK, GPT_OSS = {"enable_thinking"}, {"thinking"}, {"reasoning_effort"}


@pytest.mark.parametrize(
    ("style", "read", "variables"),
    [
        (AnswerStyle(), QWEN, {}),
        (AnswerStyle(effort="none"), QWEN, {"enable_thinking": False}),
        (AnswerStyle(effort="low"), QWEN, {"enable_thinking": True}),
        (AnswerStyle(effort="high"), DEEPSEEK, {"thinking": True}),
        (AnswerStyle(effort="high"), GPT_OSS, {"reasoning_effort": "high"}),
        (
            AnswerStyle(effort="high", thinks=False),
            QWEN | GPT_OSS,
            {"enable_thinking": False, "reasoning_effort": "high"},
        ),
        (AnswerStyle(thinks=True), {"reasoning"}, {"reasoning": True}),
        (AnswerStyle(verbosity="low"), {"verbosity"}, {"verbosity": "low"}),
        (AnswerStyle(effort="high", verbosity="low", thinks=True), set(), {}),
    ],
)
def test_variables_of_thinking(style: AnswerStyle, read: set[str], variables: dict[str, object]) -> None:
    assert style.variables(read) == variables
