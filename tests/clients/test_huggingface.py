"""Hugging Face's client: chat as of OpenAI's API, and vectors as of text-embeddings-inference."""

from typing import Any

import pytest
from live import LiveServer

hub = pytest.importorskip("huggingface_hub")

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(demo: LiveServer) -> Any:
    return hub.InferenceClient(base_url=demo.url, api_key="-")


def test_chat_whole_and_streamed(client: Any) -> None:
    whole = client.chat_completion(QUESTION, model="demo", temperature=0).choices[0].message.content
    stream = client.chat_completion(QUESTION, model="demo", temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == whole
    assert "Paris" in whole


def test_vectors_by_the_address_of_text_embeddings_inference(demo: LiveServer) -> None:
    client = hub.InferenceClient(model=f"{demo.url}/embed", api_key="-")
    vectors = client.feature_extraction(["Hello", "Good day"], normalize=True, truncate=True)
    assert vectors.shape[0] == 2
    assert (vectors**2).sum(axis=1) == pytest.approx([1, 1], abs=1e-4)
    similar = hub.InferenceClient(model=f"{demo.url}/similarity", api_key="-")
    scores = similar.sentence_similarity("Hello", other_sentences=["Hello", "It rains."])
    assert scores[0] == pytest.approx(1, abs=1e-4) and scores[1] < scores[0]


def test_tasks_by_the_address_of_the_server(demo: LiveServer) -> None:
    client = hub.InferenceClient(model=demo.url, api_key="-")
    assert client.feature_extraction(["Hello", "Good day"]).shape[0] == 2
    scores = client.sentence_similarity("Hello", other_sentences=["Hello", "It rains."])
    assert scores[0] == pytest.approx(1, abs=1e-4)
    assert client.chat_completion(QUESTION, max_tokens=4).choices[0].message.role == "assistant"
