"""The official client of Anthropic's API understands every answer, as does what Claude Code sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fake_api import make_app
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


async def test_batches(frontend: FakeFrontend, tmp_path: Path) -> None:
    app: Any = make_app(frontend, tool_call_parser="hermes", reasoning_parser="qwen3", work_folder=tmp_path)
    work = asyncio.create_task(app.state.runner.run())
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    requests: Any = [{"custom_id": "a", "params": BODY}, {"custom_id": "b", "params": {**BODY, "model": "x"}}]
    async with anthropic.AsyncAnthropic(api_key="-", base_url="http://localhost", http_client=http) as client:
        batches = client.messages.batches
        batch = await batches.create(requests=requests)
        assert batch.processing_status == "in_progress" and batch.request_counts.processing == 2
        async with asyncio.timeout(20):
            while (batch := await batches.retrieve(batch.id)).processing_status != "ended":
                await asyncio.sleep(0.01)
        assert (batch.request_counts.succeeded, batch.request_counts.errored) == (1, 1)
        found = {each.custom_id: each.result async for each in await batches.results(batch.id)}
        assert found["a"].type == "succeeded" and found["a"].message.content[-1].type == "tool_use"
        assert found["b"].type == "errored" and found["b"].error.error.type == "not_found_error"

        frontend.gate = asyncio.Event()
        second = await batches.create(requests=requests[:1])
        assert (await batches.cancel(second.id)).processing_status == "canceling"
        async with asyncio.timeout(20):
            while (second := await batches.retrieve(second.id)).processing_status != "ended":
                await asyncio.sleep(0.01)
        assert [each.result.type async for each in await batches.results(second.id)] == ["canceled"]
        assert second.request_counts.canceled == 1 and second.cancel_initiated_at is not None

        assert [each.id async for each in batches.list(limit=1)] == [second.id, batch.id]
        before = await batches.list(limit=1, before_id=batch.id)
        assert [each.id for each in before.data] == [second.id]
        for listed in ("/v1/batches", "/v1/files"):  # OpenAI's clients see none of it but its results
            answer = await http.get(f"http://localhost{listed}")
            assert {each.get("purpose") for each in answer.json()["data"]} <= {"batch_output"}
        assert (await batches.delete(batch.id)).type == "message_batch_deleted"
        with pytest.raises(anthropic.NotFoundError):
            await batches.retrieve(batch.id)
        with pytest.raises(anthropic.BadRequestError, match="twice"):
            await batches.create(requests=[requests[0], requests[0]])
    work.cancel()
    await asyncio.wait([work])
