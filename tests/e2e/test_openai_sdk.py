"""The official SDK, sync and async, against a live server."""

from __future__ import annotations

import asyncio

import openai
import pytest
from live import LiveServer

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


def test_chat(client: openai.OpenAI):
    answer = client.chat.completions.create(model="demo", messages=CAPITAL, temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.id.startswith("chatcmpl-")


def test_chat_streamed_equals_whole(client: openai.OpenAI):
    whole = client.chat.completions.create(model="demo", messages=CAPITAL, temperature=0)
    stream = client.chat.completions.create(
        model="demo", messages=CAPITAL, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    parts = list(stream)
    assert parts[0].choices[0].delta.role == "assistant"
    text = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
    assert text == whole.choices[0].message.content
    assert parts[-1].choices == [] and parts[-1].usage == whole.usage
    assert [p.choices[0].finish_reason for p in parts if p.choices][-1] == "stop"


def test_completion_with_choices_logprobs_and_stop(client: openai.OpenAI):
    answer = client.completions.create(
        model="demo", prompt=["The capital of France is", "The capital of Japan is"], n=2, seed=1,
        temperature=0.8, max_tokens=12, logprobs=2, stop=["."],
    )  # fmt: skip
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        assert "." not in choice.text
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)
        assert all(lp <= 0 for lp in choice.logprobs.token_logprobs)


def test_models(client: openai.OpenAI):
    assert [m.id for m in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors_are_the_sdks_own(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="other", messages=CAPITAL)
    with pytest.raises(openai.BadRequestError, match=r"temperature must be in \[0, 2\], got 3.0"):
        client.chat.completions.create(model="demo", messages=CAPITAL, temperature=3.0)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model="demo", prompt="word " * 20000)


async def test_async_client_with_many_at_once(demo: LiveServer):
    async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="unused", max_retries=0) as client:
        prompts = [f"What is {a} plus {b}?" for a in range(4) for b in range(4)]

        async def ask(prompt: str) -> str:
            stream = await client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": prompt}], temperature=0, stream=True
            )
            return "".join([p.choices[0].delta.content or "" async for p in stream])

        together = await asyncio.gather(*map(ask, prompts))
        alone = [await ask(p) for p in prompts[:4]]
    assert together[:4] == alone
    assert all(together)
