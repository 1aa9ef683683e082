"""tool_choice, strict tools and budgets of thinking: what the engine is asked, and the client is told."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
from fake_api import make_app, make_client, post, refusal
from fake_frontend import FakeFrontend
from fake_vocabularies import with_tokens

from engine_core.protocol import Grammar, Thinking
from server.grammar_checks.grammar_job import AskedCalls
from server.grammars.form_grammar import AskedForm

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '<tool_call>{"name": "f", "arguments": {"city": "x"}}</tool_call>'
REQUIRED = {"tool_choice": "required"}
NAMED = {"tool_choice": {"type": "function", "function": {"name": "f"}}}


def tool(name: str, schema: dict[str, Any] | None = CITY, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}}


F, G, STRICT = tool("f"), tool("g"), tool("f", strict=True)


def serving(frontend: FakeFrontend, reply: str = CALL, **options: Any) -> httpx.AsyncClient:
    frontend.reply = reply
    frontend.facts = msgspec.structs.replace(frontend.facts, max_model_len=200_000)
    return make_client(
        make_app(frontend, **{"tool_call_parser": "hermes", "reasoning_parser": "none", **options})
    )


def asked(frontend: FakeFrontend) -> AskedCalls:
    [one] = frontend.checked
    assert isinstance(one, AskedCalls)
    return one


def grammar(frontend: FakeFrontend) -> Grammar | None:
    return frontend.asked[-1][2].get("grammar")  # pyright: ignore[reportReturnType]


async def choice_of(client: httpx.AsyncClient, *tools: Any, **body: Any) -> Any:
    [choice] = (await post(client, PATH, messages=[USER], tools=[*tools], **body))["choices"]
    return choice


@pytest.mark.parametrize(
    ("body", "finish", "several"),
    [
        (REQUIRED, "tool_calls", True),
        ({**REQUIRED, "parallel_tool_calls": False}, "tool_calls", False),
        (NAMED, "stop", False),
        (allowed("required", "f"), "tool_calls", True),
    ],
)
async def test_calls_that_are_required(
    frontend: FakeFrontend, body: dict[str, Any], finish: str, several: bool
) -> None:
    choice = await choice_of(serving(frontend), F, G, **body)
    assert choice["finish_reason"] == finish
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f"]
    told = asked(frontend)
    assert told.required and told.several == several and all(each.bound for each in told.tools)
    assert [each.name for each in told.tools] == (["f", "g"] if body["tool_choice"] == "required" else ["f"])
    bound = grammar(frontend)
    assert bound is not None and bound.kind == "lark" and "city" in bound.text


@pytest.mark.parametrize("body", [{}, {"tool_choice": "auto"}, {"parallel_tool_calls": True}])
async def test_what_is_free_has_no_grammar(frontend: FakeFrontend, body: dict[str, Any]) -> None:
    choice = await choice_of(serving(frontend), F, **body)
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["tool_calls"]
    assert not frontend.checked and grammar(frontend) is None


@pytest.mark.parametrize(
    ("tools", "body", "options", "bound"),
    [
        ([STRICT, G], {}, {}, [True, False]),
        ([F], {"parallel_tool_calls": False}, {}, [False]),
        ([F, G], allowed("auto", "g"), {}, [False]),
        ([F, G], {}, {"tool_strict_level": "function"}, [False, False]),
        ([F, G], {}, {"tool_strict_level": "parameter"}, [True, True]),
    ],
)
async def test_calls_that_are_possible(
    frontend: FakeFrontend, tools: list[Any], body: dict[str, Any], options: dict[str, Any], bound: list[bool]
) -> None:
    await choice_of(serving(frontend, **options), *tools, **body)
    told = asked(frontend)
    assert not told.required and [each.bound for each in told.tools] == bound
    assert grammar(frontend) is not None


async def test_a_grammar_sleeps_until_a_special_token(frontend: FakeFrontend) -> None:
    tokens = with_tokens(frontend, "<tool_call>", "</tool_call>", "<think>", "</think>")
    client = serving(frontend, "text", reasoning_parser="qwen3")
    await choice_of(client, STRICT)
    bound = grammar(frontend)
    assert bound is not None and bound.wakes == ((tokens["<tool_call>"],),) and bound.again
    opens, closes = ((tokens[name],) for name in ("<think>", "</think>"))
    assert frontend.asked[-1][2]["thinking"] == Thinking(None, closes, opens=(opens,))
    begun = {"role": "assistant", "content": "<think>"}
    await post(client, PATH, messages=[USER, begun], continue_final_message=True, tools=[F], **REQUIRED)
    bound = grammar(frontend)
    assert bound is not None and bound.wakes == ((tokens["</think>"],),) and not bound.again


@pytest.mark.parametrize(("tools", "calls"), [([STRICT], 1), ([F], 2)])
async def test_a_held_call_is_none_while_the_model_thinks(
    frontend: FakeFrontend, tools: list[Any], calls: int
) -> None:
    with_tokens(frontend, "<tool_call>", "</tool_call>", "<think>", "</think>")
    written = f"<think>Perhaps {CALL} or so.</think>{CALL}"
    frontend.reply_ids = frontend.tokenizer.encode(written, add_special_tokens=False)
    client = serving(frontend, reasoning_parser="qwen3")
    message = (await choice_of(client, *tools))["message"]
    assert len(message["tool_calls"]) == calls
    assert (CALL in message["reasoning"]) == (calls == 1)


async def test_a_long_body_says_the_same(frontend: FakeFrontend) -> None:
    long = tool("f", {**CITY, "description": "x" * 40_000}, strict=True)
    choice = await choice_of(serving(frontend), long, **NAMED)
    assert choice["message"]["tool_calls"] and frontend.read_elsewhere and asked(frontend).tools[0].strict


FORM = {"response_format": {"type": "json_object"}}


async def test_calls_take_the_place_of_a_form_and_keep_their_own(frontend: FakeFrontend) -> None:
    with_tokens(frontend, "<think>", "</think>")
    client = serving(frontend, reasoning_parser="qwen3")
    body = {"messages": [USER], "tools": [STRICT, G], **FORM}
    response = await client.post(PATH, json={**body, "parallel_tool_calls": False})
    assert response.status_code == 200 and "warning" not in response.headers
    calls, form = sorted(frontend.checked, key=lambda each: not isinstance(each, AskedCalls))
    assert isinstance(calls, AskedCalls) and calls.required and not calls.several and not calls.thinking
    assert isinstance(form, AskedForm) and form.constraint() == "json_object"
    bound = grammar(frontend)
    assert bound is not None and "(@answer | @calls)" in bound.text and "city" in bound.text


@pytest.mark.parametrize("choice", [REQUIRED, NAMED])
async def test_what_is_required_is_calls_whatever_the_form(
    frontend: FakeFrontend, choice: dict[str, Any]
) -> None:
    await choice_of(serving(frontend), F, **choice, **FORM)
    assert asked(frontend).required


async def test_a_form_binds_where_no_tool_may_be_called(frontend: FakeFrontend) -> None:
    await choice_of(serving(frontend), F, tool_choice="none", **FORM)
    [form] = frontend.checked
    assert isinstance(form, AskedForm)


@pytest.mark.parametrize(
    ("tools", "body"), [([F], {"parallel_tool_calls": False}), ([F, G], allowed("auto", "g"))]
)
async def test_calls_that_no_grammar_tells_from_text(
    frontend: FakeFrontend, tools: list[Any], body: dict[str, Any]
) -> None:
    with_tokens(frontend, "<|channel|>", "<|message|>", "<|call|>", "<|start|>", "<|end|>")
    client = serving(frontend, "text", tool_call_parser="openai")
    body = {"messages": [USER], "tools": tools, **body}
    response = await client.post(PATH, json=body)
    assert response.status_code == 200 and "cannot be held to a grammar" in response.headers["warning"]
    assert grammar(frontend) is None and not frontend.checked
    error = await refusal(client, PATH, **{**body, "tools": [STRICT, tool("g", strict=True)]})
    assert error["param"] == "tools" and "`tool_choice` required" in error["message"]


async def test_gpt_oss_is_held_to_a_form_beside_calls(frontend: FakeFrontend) -> None:
    with_tokens(frontend, "<|channel|>", "<|message|>", "<|call|>", "<|start|>", "<|end|>")
    client = serving(frontend, "text", tool_call_parser="openai", reasoning_parser="openai_gptoss")
    response = await client.post(PATH, json={"messages": [USER], "tools": [STRICT, G], **FORM})
    assert response.status_code == 200 and "warning" not in response.headers
    bound = grammar(frontend)
    assert bound is not None and "@answer | @calls" in bound.text and "final" in bound.text


async def test_a_budget_of_thinking(frontend: FakeFrontend) -> None:
    tokens = with_tokens(frontend, "<tool_call>", "<think>", "</think>")
    client = serving(frontend, "text", reasoning_parser="qwen3")
    await post(client, PATH, messages=[USER], thinking_token_budget=5)
    opens, closes, call = ((tokens[name],) for name in ("<think>", "</think>", "<tool_call>"))
    assert frontend.asked[-1][2]["thinking"] == Thinking(5, closes, opens=(opens,))
    begun = {"role": "assistant", "content": "<think>"}
    body = {"continue_final_message": True, "tools": [F], "thinking_token_budget": 0}
    await post(client, PATH, messages=[USER, begun], **body)
    assert frontend.asked[-1][2]["thinking"] == Thinking(0, closes, True, (opens,), (call,))
    await post(client, PATH, messages=[USER], thinking_token_budget=-1)
    assert "thinking" not in frontend.asked[-1][2]
