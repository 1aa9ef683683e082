"""POST /v2/embed, in the shape of the API of Cohere."""

from __future__ import annotations

import base64
import json

import httpx
import numpy as np
import pytest
from fake_api import post, refusal
from fake_frontend import BOS, FakeFrontend, vectors

from models.pooling.config import PoolingConfig
from models.pooling.sentence_files import TextFacts

pytestmark = pytest.mark.usefixtures("embedder")

COHERE = "/v2/embed"


async def test_as_cohere_has_it(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    texts = TextFacts(prompts={"query": "q:"})
    frontend.serve("embed", pooling=PoolingConfig(texts=texts, matryoshka=True))
    answer = await post(
        client,
        COHERE,
        model="tiny",
        texts=["a", "b"],
        input_type="search_query",
        embedding_types=["float", "binary", "ubinary", "base64"],
    )
    assert frontend.pooled_tokens() == [[BOS, *b"q:a"], [BOS, *b"q:b"]]
    floats = answer["embeddings"].pop("float")
    bits = [int("".join("1" if x > 0 else "0" for x in one), 2) for one in floats]
    assert [one for [one] in answer["embeddings"].pop("ubinary")] == bits
    assert [one + 128 for [one] in answer["embeddings"].pop("binary")] == bits
    assert base64.b64decode(answer["embeddings"].pop("base64")[1]) == np.array(floats[1], "<f4").tobytes()
    assert answer.pop("id") and answer == {
        "embeddings": {},
        "texts": ["a", "b"],
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 8, "image_tokens": 0}},
        "response_type": "embeddings_by_type",
    }
    inputs = [{"content": [{"type": "text", "text": "c"}]}]
    answer = await post(client, COHERE, inputs=inputs, input_type="classification", output_dimension=4)
    assert list(answer["embeddings"]) == ["float"] and len(answer["embeddings"]["float"][0]) == 4
    assert frontend.pooled_tokens() == [[BOS, 99]]


async def test_how_cohere_cuts(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    long = "a" * 100 + "b" * 100
    await post(client, COHERE, texts=[long])
    assert frontend.pooled_tokens() == [[BOS, *[97] * 100, *[98] * 27]]
    await post(client, COHERE, texts=[long], truncate="START", max_tokens=3)
    assert frontend.pooled_tokens() == [[BOS, 98, 98]]
    assert (
        "maximum context length" in (await refusal(client, COHERE, texts=[long], truncate="NONE"))["message"]
    )
    for body, told in (
        ({}, "Exactly one of texts, images, or inputs must be provided, and it must be non-empty"),
        ({"texts": []}, "Exactly one of texts, images, or inputs"),
        ({"texts": ["a"], "images": ["data:"]}, "`images` is not supported yet"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "'float', 'binary', 'ubinary' or 'base64'"),
        ({"texts": ["a"], "max_tokens": 129}, "cannot be greater than"),
        ({"texts": ["a"], "max_tokens": 9, "truncate": "NONE"}, "truncate NONE forbids"),
        ({"texts": ["a"], "input_type": "poem"}, "no prompt named 'poem'"),
    ):
        assert told in (await refusal(client, COHERE, **body))["message"]
    frontend.answer_of = lambda item: vectors([1, 2, 3])
    error = await refusal(client, COHERE, texts=["a"], embedding_types=["binary"])
    assert "that eight divides, not 3" in error["message"]


@pytest.mark.parametrize("content", ["\ud800", ["\ud800"], [{"type": "text", "text": "\ud800"}]])
async def test_half_a_character_in_content_for_cohere(client: httpx.AsyncClient, content: object) -> None:
    body = json.dumps({"inputs": [{"content": content}]})
    response = await client.post(COHERE, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert "half of a surrogate pair" in response.json()["error"]["message"]
