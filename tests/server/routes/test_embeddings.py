"""POST /v1/embeddings and /v2/embed: every kind of input, encodings of vectors, and what is refused."""

import asyncio

import httpx
import pytest
from fake_api import leave, post
from fake_frontend import FakeFrontend
from starlette.types import ASGIApp

pytestmark = pytest.mark.usefixtures("embedder")

EMBED, COHERE = "/v1/embeddings", "/v2/embed"


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


async def test_a_conversation_that_is_cut_ends_as_its_template_does(
    client: httpx.AsyncClient, frontend: FakeFrontend
) -> None:
    long = [{"role": "user", "content": "of which much is cut"}]
    chats = [long, [{"role": "user", "content": "a"}], [*long, {"role": "tool", "content": "b"}]]
    await post(client, EMBED, messages=chats, truncate_prompt_tokens=12)
    cut = b"<user>of wh\n"
    assert [bytes(each) for each in frontend.pooled_tokens()] == [cut, b"<user>a\n", cut]


async def test_nobody_waits_any_more(app: ASGIApp, frontend: FakeFrontend) -> None:
    frontend.gate = asyncio.Event()
    assert await leave(app, EMBED, {"input": "a"}, after=0) == []
    assert frontend.pooled and frontend.running == 0
