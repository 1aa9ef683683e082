"""POST /api/embed, /api/embeddings and /api/rerank."""

from typing import Any

import httpx
import numpy as np
import pytest
from fake_api import assert_the_same_if_long, post
from fake_frontend import FakeFrontend, vectors


@pytest.fixture(autouse=True)
def served(frontend: FakeFrontend) -> None:
    frontend.serve("generate", "embed", score_type="bi-encoder")
    frontend.answer_of = lambda item: vectors(
        np.sin(np.arange(1, (item.params.dimensions or 8) + 1) * sum(item.tokens))
    )


async def test_texts(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    one = await post(client, "/api/embed", model="tiny", input="hi")
    many = await post(client, "/api/embed", model="tiny:latest", input=["hi", "ho"], keep_alive=5)
    assert many["embeddings"][0] == one["embeddings"][0] and len(many["embeddings"]) == 2
    assert (one["model"], one["prompt_eval_count"]) == ("org/tiny", len(frontend.pooled[0][0][0].tokens))
    assert one["total_duration"] > 0 and one["load_duration"] > 0
    assert frontend.pooled[0][0][0].params.use_activation is True
    assert frontend.pooled[0][0][0].params.task == "embed"


async def test_the_older_path(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    new = await post(client, "/api/embed", model="tiny", input="hi")
    old = await post(client, "/api/embeddings", model="tiny", prompt="hi")
    assert old == {"embedding": new["embeddings"][0]}


async def test_long_texts_are_cut_unless_they_must_not(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    await post(client, "/api/embed", model="tiny", input="x" * 300)
    assert len(frontend.pooled_tokens()[0]) == 128
    await post(client, "/api/embed", model="tiny", input="x" * 300, options={"num_ctx": 20})
    assert len(frontend.pooled_tokens()[0]) == 20
    response = await client.post("/api/embed", json={"model": "tiny", "input": "x" * 300, "truncate": False})
    assert response.status_code == 400 and "128" in response.json()["error"]


async def test_documents_are_ranked(client: httpx.AsyncClient) -> None:
    documents = ["Paris", "hi", "hello"]
    answer = await post(client, "/api/rerank", model="tiny", query="hi", documents=documents, top_n=2)
    assert len(answer["results"]) == 2
    best = answer["results"][0]
    assert (best["index"], best["document"]) == (1, "hi") and best["relevance_score"] == pytest.approx(1)
    bare = await post(
        client, "/api/rerank", model="tiny", query="hi", documents=documents, return_documents=False
    )
    assert all(one.keys() == {"index", "relevance_score"} for one in bare["results"])


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/api/embed", {"model": "tiny"}, "input"),
        ("/api/embed", {"model": "tiny", "input": []}, "input"),
        ("/api/embed", {"model": "tiny", "input": 5}, "input"),
        ("/api/embed", {"model": "tiny", "input": "a", "options": {"warmth": 1}}, "warmth"),
        ("/api/embeddings", {"model": "tiny"}, "prompt"),
        ("/api/rerank", {"model": "tiny", "query": "a"}, "documents"),
    ],
)
async def test_a_wrong_body_gets_one_sentence(
    client: httpx.AsyncClient, frontend: FakeFrontend, path: str, body: dict[str, Any], word: str
) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json().keys() == {"error"}
    message = response.json()["error"]
    assert word in message and "\n" not in message
    await assert_the_same_if_long(client, frontend, path, body)


async def test_a_model_without_vectors_says_what_it_does(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    frontend.serve("generate")
    response = await client.post("/api/embed", json={"model": "tiny", "input": "a"})
    assert (response.status_code, "'embed'" in response.json()["error"]) == (400, True)
