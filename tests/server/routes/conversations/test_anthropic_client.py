"""The official client of Anthropic's API understands every answer, as does what Claude Code sends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from fake_frontend import FakeFrontend
from later import Later
from starlette.types import ASGIApp

from server.errors import Overloaded, Unavailable

anthropic = Later("anthropic")

TOOL: Any = {
    "name": "get_weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
BODY: Any = {
    "model": "tiny",
    "max_tokens": 1000,
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [TOOL],
}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
CLAUDE_CODE: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 3000,
    "stream": True,
    "temperature": 1,
    "thinking": {"type": "enabled", "budget_tokens": 1999},
    "metadata": {"user_id": "user_0_account__session_1"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.37; cch=00001;"},
        {"type": "text", "text": "You are Claude Code.", **EPHEMERAL},
        {"type": "text", "text": "Be careful.", **EPHEMERAL},
    ],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>today</system-reminder>"},
            {"type": "text", "text": "What is here?", **EPHEMERAL}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "I list.", "signature": "EqQB"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
            {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {"file_path": "/a"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.txt", "is_error": False},
            {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True,
             "content": [{"type": "text", "text": "<tool_use_error>no</tool_use_error>"}], **EPHEMERAL}]},
    ],
    "tools": [
        {"name": name, "description": name, "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": {}}}
        for name in ("Bash", "Read", "Edit")
    ],
}  # fmt: skip


@pytest.fixture
async def anthropic_client(app: ASGIApp) -> AsyncIterator[anthropic.AsyncAnthropic]:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    async with anthropic.AsyncAnthropic(
        api_key="-", base_url="http://localhost", http_client=http, max_retries=0
    ) as client:
        yield client


async def test_stream(anthropic_client: anthropic.AsyncAnthropic) -> None:
    async with anthropic_client.messages.stream(**BODY) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_message()
    whole = await anthropic_client.messages.create(**BODY)
    assert [block.model_dump(exclude={"id"}, exclude_none=True) for block in final.content] == [
        block.model_dump(exclude={"id"}, exclude_none=True) for block in whole.content
    ]
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert "".join(event.text for event in events if event.type == "text") == "I look."


async def test_an_answer_goes_back(anthropic_client: anthropic.AsyncAnthropic) -> None:
    answer = await anthropic_client.messages.create(**BODY)
    thinking, text, first, _ = answer.content
    assert thinking.type == "thinking" and thinking.signature
    assert text.type == "text" and text.text == "I look."
    assert first.type == "tool_use" and first.input == {"city": "Pa<ris"}
    assert answer.stop_reason == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "sun"}
        for block in answer.content
        if block.type == "tool_use"
    ]
    said = [*BODY["messages"], {"role": "assistant", "content": answer.content}]
    again = await anthropic_client.messages.create(
        **{**BODY, "messages": [*said, {"role": "user", "content": results}]}
    )
    assert again.type == "message"


async def test_count_tokens(anthropic_client: anthropic.AsyncAnthropic) -> None:
    counted = await anthropic_client.messages.count_tokens(
        model="tiny", messages=BODY["messages"], tools=[TOOL], system="be"
    )
    answer = await anthropic_client.messages.create(**BODY, system="be")
    assert counted.input_tokens == answer.usage.input_tokens


async def test_errors_have_their_classes(
    frontend: FakeFrontend, anthropic_client: anthropic.AsyncAnthropic
) -> None:
    with pytest.raises(anthropic.NotFoundError):
        await anthropic_client.messages.create(**{**BODY, "model": "x"})
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        await anthropic_client.messages.create(**BODY, extra_body={"temperature": 3})
    frontend.error = Overloaded("Full.", retry_after=1)
    with pytest.raises(anthropic.InternalServerError, match="Full"):
        await anthropic_client.messages.create(**BODY)
    frontend.error, frontend.tokens_before_error = Unavailable("The engine has stopped."), 30
    stream = await anthropic_client.messages.create(**BODY, stream=True)
    with pytest.raises(anthropic.APIStatusError, match="stopped"):
        async for _ in stream:
            pass


async def test_what_claude_code_sends(
    frontend: FakeFrontend, anthropic_client: anthropic.AsyncAnthropic
) -> None:
    frontend.reply = (
        '<think>so</think>\n\nok<tool_call>{"name": "Bash", "arguments": {"command": "a"}}</tool_call>'
    )
    known = ("model", "max_tokens", "messages", "system", "tools", "thinking")
    body: Any = {key: CLAUDE_CODE[key] for key in known}
    rest = {key: value for key, value in CLAUDE_CODE.items() if key not in (*known, "stream")}
    async with anthropic_client.messages.stream(
        **body,
        extra_body=rest,  # clients differ in what they have arguments for
        extra_query={"beta": "true"},
        extra_headers={"anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14"},
    ) as stream:
        final = await stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    prompt = bytes(frontend.asked[-1][0]).decode()
    assert "billing" not in prompt and prompt.startswith("<system>You are Claude Code.\nBe careful.\n<user>")
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.37; cch=99999;"}
    body["system"] = [billing, *body["system"][1:]]
    await anthropic_client.messages.create(**body, extra_body=rest)
    assert bytes(frontend.asked[-1][0]).decode() == prompt
