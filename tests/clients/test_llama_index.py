"""LlamaIndex's classes for servers that speak like OpenAI: completions, chat, streams, vectors."""

from typing import Any

import pytest
from live import LiveServer

llms = pytest.importorskip("llama_index.llms.openai_like")
embeddings = pytest.importorskip("llama_index.embeddings.openai_like")
core = pytest.importorskip("llama_index.core.llms")

QUESTION = "What is the capital of France?"


@pytest.fixture
def model(demo: LiveServer) -> Any:
    return llms.OpenAILike(
        model="demo", api_base=f"{demo.url}/v1", api_key="-", is_chat_model=True, temperature=0, max_tokens=40
    )


def test_chat_whole_and_streamed(model: Any) -> None:
    question = [core.ChatMessage(role="user", content=QUESTION)]
    whole = model.chat(question).message.content
    assert "Paris" in whole
    assert "".join(piece.delta or "" for piece in model.stream_chat(question)) == whole


def test_completions(demo: LiveServer) -> None:
    model = llms.OpenAILike(
        model="demo",
        api_base=f"{demo.url}/v1",
        api_key="-",
        is_chat_model=False,
        temperature=0,
        max_tokens=10,
    )
    whole = model.complete("The capital of France").text
    assert whole
    assert "".join(piece.delta or "" for piece in model.stream_complete("The capital of France")) == whole


def test_texts_are_embedded(demo: LiveServer) -> None:
    model = embeddings.OpenAILikeEmbedding(model_name="demo", api_base=f"{demo.url}/v1", api_key="-")
    first, second = model.get_text_embedding_batch(["Hello", "Good day"])
    assert len(first) == len(second) and model.get_text_embedding("Hello") == pytest.approx(first, abs=1e-5)
