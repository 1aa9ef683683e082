"""Haystack's components: a chat generator, and embedders of texts and documents."""

from __future__ import annotations

from typing import Any

import pytest
from live import LiveServer

haystack = pytest.importorskip("haystack")

QUESTION = "What is the capital of France?"


@pytest.fixture
def where(demo: LiveServer) -> dict[str, Any]:
    from haystack.utils import Secret

    return {"model": "demo", "api_base_url": f"{demo.url}/v1", "api_key": Secret.from_token("-")}


def test_chat_streams_into_a_callback(where: dict[str, Any]) -> None:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage

    pieces: list[str] = []
    generator = OpenAIChatGenerator(**where, streaming_callback=lambda piece: pieces.append(piece.content))
    [reply] = generator.run([ChatMessage.from_user(QUESTION)], generation_kwargs={"temperature": 0})[
        "replies"
    ]
    assert "Paris" in reply.text and "".join(pieces) == reply.text


def test_documents_are_embedded(where: dict[str, Any]) -> None:
    from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder

    documents = [haystack.Document(content=text) for text in ("Hello", "Good day")]
    found = OpenAIDocumentEmbedder(**where, progress_bar=False).run(documents)["documents"]
    alone = OpenAITextEmbedder(**where).run("Hello")["embedding"]
    assert len(found) == 2 and found[0].embedding == pytest.approx(alone, abs=1e-5)
