"""The official clients of OpenAI's APIs and of Anthropic's Messages, against a live server."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from later import Later

anthropic = Later("anthropic")

QUESTION = "What is the capital of France?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


def test_messages_streamed_equal_whole_ones(claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": "demo", "max_tokens": 50, "messages": MESSAGES, "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**asked)
    [block] = whole.content
    assert block.type == "text" and "Paris" in block.text
    assert whole.stop_reason == "end_turn"
    with claude.messages.stream(**asked) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(texts) > 1 and "".join(texts) == block.text
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", whole.usage.output_tokens)
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        claude.messages.create(**{**asked, "messages": [{"role": "user", "content": "word " * 20000}]})


def test_what_is_cached_is_counted_apart(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    system = "You answer questions on capitals. " * 20
    counted = claude.messages.count_tokens(model="demo", system=system, messages=MESSAGES).input_tokens
    for _ in range(2):
        message = claude.messages.create(model="demo", max_tokens=1, system=system, messages=MESSAGES)
    cached = message.usage.cache_read_input_tokens or 0
    assert 0 < cached < counted and message.usage.input_tokens == counted - cached
    response = client.responses.create(model="demo", input=QUESTION, instructions=system, max_output_tokens=1)
    assert response.usage is not None and response.usage.input_tokens == counted
    assert response.usage.input_tokens_details.cached_tokens == cached


def test_long_conversations_are_counted(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    long = "word " * 20000  # a helper process reads it
    messages: Any = [{"role": "user", "content": long}]
    counted = claude.messages.count_tokens(model="demo", messages=messages).input_tokens
    assert counted > 20000
    path = "/responses/input_tokens"
    other: Any = client.post(path, cast_to=object, body={"model": "demo", "input": long})
    assert other["input_tokens"] == counted
