"""Cohere's client of version 2: rerank and embed."""

from typing import Any

import pytest
from live import LiveServer

cohere = pytest.importorskip("cohere")

DOCUMENTS = ["Cats are animals.", "Paris is the capital of France.", "It rains."]


@pytest.fixture
def client(demo: LiveServer) -> Any:
    return cohere.ClientV2(api_key="-", base_url=demo.url)


def test_rerank(client: Any) -> None:
    answer = client.rerank(model="demo", query="the capital of France", documents=DOCUMENTS, top_n=2)
    scores = [one.relevance_score for one in answer.results]
    assert len(scores) == 2 and scores == sorted(scores, reverse=True)


def test_embed(client: Any) -> None:
    answer = client.embed(
        model="demo", texts=DOCUMENTS, input_type="search_document", embedding_types=["float", "ubinary"]
    )
    assert len(answer.embeddings.float_) == len(answer.embeddings.ubinary) == 3
