"""LiteLLM, as a client of OpenAI's chat completions and of Anthropic's Messages."""

from __future__ import annotations

import os
from typing import Any

import pytest
from live import LiveServer

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it fetches one when it is imported
litellm = pytest.importorskip("litellm")
litellm.suppress_debug_info = True

QUESTION = "What is the capital of France?"


@pytest.fixture(params=["openai", "anthropic"])
def asked(request: pytest.FixtureRequest, demo: LiveServer) -> dict[str, Any]:
    """The arguments of a request to one of the two APIs."""
    return {
        "model": f"{request.param}/demo",
        "api_base": demo.url + ("/v1" if request.param == "openai" else ""),
        "api_key": "-",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 30,
    }


def test_completion(asked: dict[str, Any]) -> None:
    answer = litellm.completion(**asked)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 0


def test_a_stream_says_the_same(asked: dict[str, Any]) -> None:
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)]
    assert len(pieces) > 2
    assert "".join(pieces) == litellm.completion(**asked).choices[0].message.content


def test_errors_have_their_classes(asked: dict[str, Any]) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**asked, "model": asked["model"] + "-of-another"})
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**{**asked, "temperature": 3})
