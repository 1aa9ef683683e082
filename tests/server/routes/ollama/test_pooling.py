"""POST /api/embed, /api/embeddings and /api/rerank."""

from typing import Any

import httpx
import numpy as np
import pytest
from fake_api import assert_the_same_if_long
from fake_frontend import FakeFrontend, vectors


@pytest.fixture(autouse=True)
def served(frontend: FakeFrontend) -> None:
    frontend.serve("generate", "embed", score_type="bi-encoder")
    frontend.answer_of = lambda item: vectors(
        np.sin(np.arange(1, (item.params.dimensions or 8) + 1) * sum(item.tokens))
    )


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
