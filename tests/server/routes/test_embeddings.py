"""POST /v1/embeddings and /v2/embed: every kind of input, encodings of vectors, and what is refused."""

import asyncio
import json

import httpx
import pytest
from fake_api import leave, post
from fake_frontend import FakeFrontend
from starlette.types import ASGIApp

from models.pooling.config import PoolingConfig

pytestmark = pytest.mark.usefixtures("embedder")

EMBED, COHERE = "/v1/embeddings", "/v2/embed"


async def test_parameters_reach_the_engine(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    frontend.serve("embed", pooling=PoolingConfig(matryoshka=True))
    answer = await post(
        client, EMBED, input="a", dimensions=4, normalize=False, priority=3, cache_salt="s", request_id="r"
    )
    assert len(answer["data"][0]["embedding"]) == 4 and answer["id"] == "embd-r"
    [(items, rest)] = frontend.pooled
    assert (items[0].params.dimensions, items[0].params.use_activation) == (4, False)
    assert rest == {
        "priority": 3,
        "owner": "127.0.0.1",
        "weight": 1.0,
        "salt": "s",
        "group": 1,
        "request_id": "embd-r",
        "replica": None,
    }


async def test_very_many_texts_are_answered_in_pieces(
    client: httpx.AsyncClient, frontend: FakeFrontend
) -> None:
    response = await client.post(EMBED, json={"input": [[i % 250 + 1] for i in range(10_000)]})
    assert "content-length" not in response.headers
    data = response.json()["data"]
    assert [one["index"] for one in data] == list(range(10_000))
    assert data[9_999]["embedding"] == data[249]["embedding"] != data[248]["embedding"]
    assert response.json()["usage"]["prompt_tokens"] == 10_000
    short = await client.post(EMBED, json={"input": "a"})
    assert "content-length" in short.headers


async def test_nobody_waits_any_more(app: ASGIApp, frontend: FakeFrontend) -> None:
    frontend.gate = asyncio.Event()
    assert await leave(app, EMBED, {"input": "a"}, after=0) == []
    assert frontend.pooled and frontend.running == 0


@pytest.mark.parametrize("content", ["\ud800", ["\ud800"], [{"type": "text", "text": "\ud800"}]])
async def test_half_a_character_in_content_for_cohere(client: httpx.AsyncClient, content: object) -> None:
    body = json.dumps({"inputs": [{"content": content}]})
    response = await client.post(COHERE, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert "half of a surrogate pair" in response.json()["error"]["message"]
