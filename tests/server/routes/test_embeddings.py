"""POST /v1/embeddings and /v2/embed: every kind of input, encodings of vectors, and what is refused."""

import asyncio
import base64
import json
from typing import Any

import httpx
import numpy as np
import pytest
from fake_api import leave, make_app, make_client, post, refusal
from fake_frontend import BOS, FakeFrontend, vectors
from starlette.types import ASGIApp

from models.pooling.config import PoolingConfig
from models.pooling.text_files import TextFacts
from server.errors import Internal

pytestmark = pytest.mark.usefixtures("embedder")

EMBED, COHERE = "/v1/embeddings", "/v2/embed"


async def test_a_list_of_vectors(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    answer = await post(client, EMBED, model="tiny", input=["ab", "c"], user="me")
    assert answer.pop("id").startswith("embd-")
    created = answer.pop("created")
    assert isinstance(created, int)
    data = answer.pop("data")
    assert answer == {
        "object": "list",
        "model": "org/tiny",
        "usage": {"prompt_tokens": 5, "total_tokens": 5, "completion_tokens": 0},
    }
    assert [(one["index"], one["object"]) for one in data] == [(0, "embedding"), (1, "embedding")]
    assert frontend.pooled_tokens() == [[BOS, 97, 98], [BOS, 99]]
    expected = frontend.answer_of(frontend.pooled[0][0][1])
    assert np.array(data[1]["embedding"], np.float32).tobytes() == expected.data


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("ab", [[BOS, 97, 98]]),
        (["a", "b"], [[BOS, 97], [BOS, 98]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ("", [[BOS]]),
        ([{"role": "user", "content": "a"}], [list(b"<user>a\n")]),
        (
            [
                [{"role": "user", "content": "a"}],
                [{"role": "user", "content": [{"type": "text", "text": "b"}]}],
            ],
            [list(b"<user>a\n"), list(b"<user>b\n")],
        ),
    ],
)
async def test_every_kind_of_input(
    client: httpx.AsyncClient, frontend: FakeFrontend, given: object, expected: list[list[int]]
) -> None:
    await post(client, EMBED, input=given)
    assert frontend.pooled_tokens() == expected


async def test_messages_have_a_field_of_their_own(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    talk = [{"role": "user", "content": "a"}]
    await post(client, EMBED, messages=talk, add_generation_prompt=True, add_special_tokens=True)
    assert frontend.pooled_tokens() == [[BOS, *b"<user>a\n<assistant>"]]
    await post(client, EMBED, messages=[talk, talk])
    assert len(frontend.pooled_tokens()) == 2


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({}, "input", "Exactly one of `input` and `messages`"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input", "Exactly one of"),
        ({"input": []}, "input", "at least one text"),
        ({"input": [[9999]]}, "input", "Vocabulary size: 258"),
        (
            {"input": ["a", 1]},
            "body.input",
            "Input should be a string, a list of strings, a list of token ids",
        ),
        ({"input": ["a", [1]]}, "body.input", "all of a list of the same kind"),
        ({"input": [[1], "a"]}, "body.input", "all of a list of the same kind"),
        ({"input": {"text": "a"}}, "body.input", "all of a list of the same kind"),
        ({"input": [True]}, "body.input", "all of a list of the same kind"),
        ({"input": 5}, "body.input", "all of a list of the same kind"),
        ({"input": [{"role": "hacker", "content": "a"}]}, "body.messages.0.role", "Input should be"),
        (
            {"input": "a" * 200},
            "input_tokens",
            "maximum context length is 128 tokens. However, input 0 contains 201",
        ),
        ({"input": "a", "encoding_format": "xyz"}, "body.encoding_format", "'float', 'base64', 'bytes'"),
        ({"input": "a", "embed_dtype": "fp8_e4m3"}, "embed_dtype", "base64, bytes and bytes_only"),
        ({"input": "a", "dimensions": 10**9}, "dimensions", "does not support Matryoshka"),
        ({"input": "a", "dimension": 4}, "dimension", "did you mean `dimensions`?"),
        ({"input": "a", "normalize": True, "use_activation": False}, "use_activation", "mean the same"),
        ({"input": "a", "normalize": "yes"}, "body.use_activation", "valid boolean"),
        ({"input": "a", "truncate_prompt_tokens": 129}, "truncate_prompt_tokens", "cannot be greater than"),
        (
            {"input": "a", "truncate_prompt_tokens": -2},
            "body.truncate_prompt_tokens",
            "greater than or equal",
        ),
        ({"input": "a", "truncation_side": "up"}, "body.truncation_side", "'left' or 'right'"),
        ({"input": "a", "padding": "max_length"}, "padding", "not supported yet"),
        ({"input": "a", "cache_salt": "a/b"}, "cache_salt", "must not contain"),
        ({"input": "a", "prompt_name": "q", "input_type": "q"}, "input_type", "both choose the prompt"),
        ({"input": [1, 2], "prompt_name": "q"}, "prompt_name", "before texts only"),
        ({"input": "a", "request_id": "a b"}, "request_id", "1 to 128 characters"),
    ],
)
async def test_one_readable_error(
    client: httpx.AsyncClient, frontend: FakeFrontend, body: dict[str, Any], param: str, told: str
) -> None:
    error = await refusal(client, EMBED, **body)
    assert (error["param"], told in error["message"]) == (param, True), error
    assert not frontend.pooled


async def test_another_model(client: httpx.AsyncClient) -> None:
    response = await client.post(EMBED, json={"model": "x", "input": "a"})
    assert (response.status_code, response.json()["error"]["type"]) == (404, "NotFoundError")


async def test_base64_is_what_the_engine_gave(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    floats = await post(client, EMBED, input=["a", "b"])
    coded = await post(client, EMBED, input=["a", "b"], encoding_format="base64")
    for one, other in zip(floats["data"], coded["data"], strict=True):
        raw = base64.b64decode(other["embedding"])
        assert raw == np.array(one["embedding"], "<f4").tobytes()
    halves = await post(
        client, EMBED, input="a", encoding_format="base64", embed_dtype="float16", endianness="big"
    )
    assert np.allclose(
        np.frombuffer(base64.b64decode(halves["data"][0]["embedding"]), ">f2"),
        floats["data"][0]["embedding"],
        atol=1e-3,
    )


async def test_bare_bytes(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    response = await client.post(EMBED, json={"input": ["a", "b"], "encoding_format": "bytes"})
    assert response.headers["content-type"] == "application/octet-stream"
    metadata = json.loads(response.headers["metadata"])
    assert metadata["data"][1] == {
        "index": 1,
        "embed_dtype": "float32",
        "endianness": "native",
        "start": 32,
        "end": 64,
        "shape": [8],
    }
    assert metadata["usage"]["prompt_tokens"] == 4 and metadata["id"].startswith("embd-")
    expected = b"".join(frontend.answer_of(item).data for item in frontend.pooled[0][0])
    assert response.content == expected
    response = await client.post(EMBED, json={"input": ["a", "b"], "encoding_format": "bytes_only"})
    assert response.content == expected and "metadata" not in response.headers
    error = await refusal(client, EMBED, input=["a"] * 257, encoding_format="bytes")
    assert "at most 256 texts" in error["message"]


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


async def test_long_texts_are_cut_and_stay_in_order(
    client: httpx.AsyncClient, frontend: FakeFrontend
) -> None:
    await post(client, EMBED, input=["ab", "c" * 500, "d"], truncate_prompt_tokens=-1)
    assert frontend.pooled_tokens() == [[BOS, 97, 98], [BOS, *[99] * 127], [BOS, 100]]
    await post(client, EMBED, input="abcd", truncate_prompt_tokens=3)
    assert frontend.pooled_tokens() == [[BOS, 97, 98]]
    await post(client, EMBED, input="abcd", truncate_prompt_tokens=3, truncation_side="left")
    assert frontend.pooled_tokens() == [[BOS, 99, 100]]


async def test_prompts(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    texts = TextFacts(prompts={"query": "q:", "document": "d:"})
    frontend.serve("embed", pooling=PoolingConfig(texts=texts), default_prompt_name="document")
    for asked, written in (
        ({}, b"d:a"),
        ({"prompt_name": "query"}, b"q:a"),
        ({"input_type": "search_query"}, b"q:a"),
    ):
        await post(client, EMBED, input="a", **asked)
        assert frontend.pooled_tokens() == [[BOS, *written]]


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


async def test_cached_tokens_are_told_if_asked_for(frontend: FakeFrontend) -> None:
    frontend.cached = 2
    async with make_client(make_app(frontend, enable_prompt_tokens_details=True)) as client:
        answer = await post(client, EMBED, input=["abc", "def"])
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


async def test_nobody_waits_any_more(app: ASGIApp, frontend: FakeFrontend) -> None:
    frontend.gate = asyncio.Event()
    assert await leave(app, EMBED, {"input": "a"}, after=0) == []
    assert frontend.pooled and frontend.running == 0


async def test_a_failure_of_the_engine(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    frontend.pool_errors = [Internal("the model produced non-finite values")]
    response = await client.post(EMBED, json={"input": "a"})
    assert (response.status_code, response.json()["error"]["message"]) == (
        500,
        "the model produced non-finite values",
    )


# The API of Cohere


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
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "Exactly one of texts, images, or inputs must be provided, and it must be non-empty"),
        ({"texts": []}, "Exactly one of texts, images, or inputs"),
        ({"texts": ["a"], "images": ["data:"]}, "Exactly one of texts, images, or inputs"),
        ({"texts": ["a"], "embedding_types": ["int4"]}, "'float', 'int8', 'uint8', 'binary'"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "one vector does not have"),
        ({"texts": ["a"], "max_tokens": 129}, "cannot be greater than"),
        ({"texts": ["a"], "max_tokens": 9, "truncate": "NONE"}, "truncate NONE forbids"),
        ({"texts": ["a"], "input_type": "poem"}, "no prompt named 'poem'"),
    ]
    for body, told in refused:
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
