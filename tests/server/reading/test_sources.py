"""Requests to a model whose encoder reads the prompt: what has a meaning only where prompts are continued."""

from typing import Any

import pytest
from fake_frontend import FakeFrontend

from server.errors import BadRequest
from server.model_facts import SourceFacts
from server.reading.prompts import read_chat, read_completion
from server.reading.reading_context import ReadingContext, ReadingOptions
from server.schemas.chat import ChatRequest
from server.schemas.completions import CompletionRequest


@pytest.fixture
def context() -> ReadingContext:
    frontend = FakeFrontend()
    frontend.serve("generate", sources=SourceFacts(8, (2,)))
    return ReadingContext(frontend.facts, frontend.tokenizer, ReadingOptions())


@pytest.mark.parametrize(
    "field",
    [
        {"echo": True},
        {"prompt_logprobs": 1},
        {"use_beam_search": True},
        {"prompt": [], "prompt_embeds": ["AA=="]},
    ],
)
def test_what_continues_a_prompt_is_refused_by_name(context: ReadingContext, field: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=f"{list(field)[-1]}: this is an encoder-decoder model"):
        read_completion(CompletionRequest.model_validate({"prompt": "a", **field}), context)


def test_prompts_are_as_long_as_the_encoder_reads_and_there_are_no_chats(context: ReadingContext) -> None:
    [prompt] = read_completion(CompletionRequest.model_validate({"prompt": [[5] * 8]}), context)
    assert prompt.length == 8
    with pytest.raises(BadRequest, match="reads 8 tokens at most"):
        read_completion(CompletionRequest.model_validate({"prompt": [[5] * 9]}), context)
    with pytest.raises(BadRequest, match="no chats: POST /v1/completions"):
        read_chat(ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}]}), context)
