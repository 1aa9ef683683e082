"""The space of vectors in answers and cards, and the refusal of another than a client requires."""

from typing import Any

import httpx
import msgspec
import pytest
from fake_api import post
from fake_frontend import FakeFrontend, vectors

from models.pooling.config import PoolingConfig, VectorFacts
from models.pooling.text_files import TextFacts

EMBED = "/v1/embeddings"
COMPARED = {"inputs": {"source_sentence": "a", "sentences": ["b"]}}
MADE = {
    "embed": VectorFacts("ab" * 32, "mean", True, 8),
    "token_embed": VectorFacts("ab" * 32, "tokens", True, 8),
}


@pytest.fixture(autouse=True)
def spaced(frontend: FakeFrontend, embedder: None) -> None:
    pooling = PoolingConfig(matryoshka=True, texts=TextFacts(prompts={"query": "q: "}))
    frontend.serve("generate", "embed", "token_embed", vectors=MADE, pooling=pooling)


async def usual(client: httpx.AsyncClient) -> str:
    return (await client.get("/v1/models")).json()["data"][0]["embedding_space"]


async def test_every_answer_with_vectors_names_its_space(client: httpx.AsyncClient) -> None:
    space = await usual(client)
    assert (await client.get("/info")).json()["embedding_space"] == space
    bodies = {
        EMBED: {"input": "a"},
        "/pooling": {"input": "a", "task": "embed"},
        "/v2/embed": {"texts": ["a"]},
        "/embed": {"inputs": "a"},
        "/api/embed": {"model": "tiny", "input": "a"},
        "/api/embeddings": {"model": "tiny", "prompt": "a"},
    }
    for path, body in bodies.items():
        answer = await client.post(path, json=body)
        assert (answer.status_code, answer.headers.get("x-embedding-space")) == (200, space), (
            path,
            answer.text,
        )
        if path not in ("/embed", "/api/embeddings"):
            assert answer.json()["embedding_space"] == space, path
    by_bytes = await client.post(EMBED, json={"input": "a", "encoding_format": "bytes_only"})
    assert by_bytes.headers["x-embedding-space"] == space
    for path, body in ((EMBED, {"input": "a", "dimensions": 4}), ("/embed_all", {"inputs": "a"})):
        assert (await client.post(path, json=body)).headers["x-embedding-space"] != space
    cohere = await client.post("/v2/embed", json={"texts": ["a"], "embedding_types": ["binary"]})
    assert cohere.json()["embedding_space"].endswith(".values-binary")
    scored = await client.post("/similarity", json=COMPARED)
    assert scored.status_code == 200 and "x-embedding-space" not in scored.headers


async def test_another_space_is_refused_before_anything_is_computed(
    client: httpx.AsyncClient, frontend: FakeFrontend
) -> None:
    space = await usual(client)
    body = {"input": "a", "prompt_name": "query", "dimensions": 4}
    ways: list[dict[str, Any]] = [
        {"params": {"require_space": space}},
        {"headers": {"X-Require-Space": space}},
    ]
    for given in ways:
        assert (await client.post(EMBED, json={"input": "a"}, **given)).status_code == 200
        frontend.pooled.clear()
        refused = await client.post(EMBED, json=body, **given)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (409, "space_mismatch")
        assert "dimensions is 4 here and 8 there" in error["message"] and "prompt is" in error["message"]
        assert frontend.pooled == []
    of_queries = ".".join(part for part in space.split(".") if not part.startswith(("prompt", "dimensions")))
    assert (await client.post(EMBED, json=body, params={"require_space": of_queries})).status_code == 200


async def test_a_space_is_required_of_vectors_only(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    answer = await client.post("/similarity?require_space=x", json=COMPARED)
    assert answer.status_code == 400 and "makes none" in answer.json()["error"]["message"]
    assert frontend.pooled == []
    refused = await client.post(f"{EMBED}?require_space=", json={"input": "a"})
    assert refused.status_code == 400 and "is empty" in refused.json()["error"]["message"]


async def test_without_vectors_there_is_no_space(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    frontend.serve("generate", vectors={})
    assert (await client.get("/v1/models")).json()["data"][0]["embedding_space"] is None
    frontend.serve("embed", vectors={})
    assert "embedding_space" not in await post(client, EMBED, input="a")


async def test_each_of_several_outputs_has_its_space(
    client: httpx.AsyncClient, frontend: FakeFrontend
) -> None:
    one = vectors([1.0] * 8)
    frontend.answer_of = lambda item: msgspec.structs.replace(
        one, others=dict.fromkeys(item.params.outputs, one)
    )
    answer = (await client.post(EMBED, json={"input": "a", "outputs": ["tokens", "dense"]})).json()
    alone = (await client.post(EMBED, json={"input": "a"})).json()["embedding_space"]
    spaces = answer["embedding_spaces"]
    assert [*spaces] == ["tokens", "dense"] and spaces["dense"] == alone != spaces["tokens"]
    assert answer["embedding_space"] == spaces["tokens"]
