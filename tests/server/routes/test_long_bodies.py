"""Long bodies, whose texts a helper reads: the answers are those to the same bodies if they were short."""

import json
from typing import Any

import httpx
import pytest
from fake_api import assert_the_same_if_long, make_app, make_client
from fake_frontend import FakeFrontend, FakeLongBodies

from server.http.connection.bodies import BODY_MEMORY
from server.model_facts import Limits
from server.schemas.body import LONG

TALK = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": ["a", {"type": "text", "text": "b"}]},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hi", "echo": True, "logprobs": 1, "max_tokens": 2}),
    ("/v1/completions", {"prompt": ["a", "bc"], "n": 2, "max_tokens": 2, "return_token_ids": True}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 2, "echo": True, "return_token_ids": True}),
    ("/v1/completions", {"prompt": "x" * 300, "truncate_prompt_tokens": 5, "echo": True, "max_tokens": 1}),
    ("/v1/completions", {"prompt": "hi", "stream": True, "return_token_ids": True, "max_tokens": 2}),
    ("/v1/completions", {"prompt": "hi", "logit_bias": {"1": 2}, "stop": "x", "seed": 1, "max_tokens": 1}),
    ("/v1/completions", {"prompt": "hi", "temperature": 3}),
    ("/v1/completions", {"prompt": "hi", "temprature": 3}),
    ("/v1/completions", {"prompt": ["a"] * 257}),
    ("/v1/completions", {"prompt": "x" * 300}),
    ("/v1/completions", {"prompt": "hi", "model": "none"}),
    ("/v1/chat/completions", {"messages": TALK, "tools": [TOOL], "max_tokens": 3}),
    (
        "/v1/chat/completions",
        {"messages": TALK, "echo": True, "continue_final_message": True, "max_tokens": 3},
    ),
    ("/v1/chat/completions", {"messages": TALK, "stream": True, "max_tokens": 3, "return_token_ids": True}),
    ("/v1/chat/completions", {"messages": TALK, "chat_template_kwargs": {"mood": "calm"}, "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": TALK, "chat_template": "{{ 1 }}"}),
    ("/v1/chat/completions", {"messages": TALK, "reasoning_effort": "low", "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": TALK, "tools": []}),
    ("/v1/chat/completions", {"messages": [{"role": "hacker"}]}),
    ("/tokenize", {"prompt": "hi", "return_token_strs": True}),
    ("/tokenize", {"messages": TALK}),
    ("/detokenize", {"tokens": [104, 105]}),
    ("/detokenize", {"tokens": [1000]}),
    ("/v1/embeddings", {"input": "hi"}),
    ("/v1/embeddings", {"input": ["hi", "there"], "encoding_format": "base64"}),
    ("/v1/embeddings", {"input": [[1, 2, 3], [4]], "encoding_format": "bytes"}),
    ("/v1/embeddings", {"input": [TALK, TALK]}),
    ("/v1/embeddings", {"messages": TALK, "add_special_tokens": True}),
    ("/v1/embeddings", {"input": ["x" * 300], "truncate_prompt_tokens": 4}),
    ("/v1/embeddings", {"input": ["x" * 300]}),
    ("/v1/embeddings", {"input": ["a"] * 11}),
    ("/v1/embeddings", {"input": "hi", "prompt_name": "none"}),
    ("/pooling", {"input": ["hi"], "task": "token_embed"}),
    ("/classify", {"input": ["hi", "ho"]}),
    ("/v2/embed", {"texts": ["hi", "ho"], "embedding_types": ["float"]}),
    ("/v2/embed", {"inputs": [{"content": "hi"}], "truncate": "NONE"}),
    ("/embed", {"inputs": "hi"}),
    ("/embed", {"inputs": ["hi", "ho"], "truncate": True}),
    ("/embed_all", {"inputs": ["hi"]}),
    ("/predict", {"inputs": "hi"}),
    ("/predict", {"inputs": [["hi"], ["a", "b"]], "raw_scores": True}),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}}),
    ("/score", {"text_1": "a", "text_2": ["b", "cc"]}),
    ("/v1/score", {"queries": ["a", "b"], "documents": ["b", "cc"]}),
    ("/score", {"text_1": ["a", "b"], "text_2": ["b", "c", "d"]}),
    ("/rerank", {"query": "a", "documents": ["b", "dddd", "cc"]}),
    ("/rerank", {"query": "a", "documents": ["b", "cc"], "return_documents": False, "top_n": 1}),
]


@pytest.fixture(autouse=True)
def served(frontend: FakeFrontend) -> None:
    tasks = ("generate", "embed", "token_embed", "classify")
    frontend.serve(*tasks, score_type="bi-encoder", limits=Limits(inputs=10))


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_the_answer_is_that_to_a_short_body(
    client: httpx.AsyncClient, frontend: FakeFrontend, path: str, body: dict[str, Any]
) -> None:
    await assert_the_same_if_long(client, frontend, path, body)


async def test_a_template_of_a_request_is_for_the_helper(frontend: FakeFrontend) -> None:
    body = {"messages": TALK, "chat_template": "<{{ messages[0].content }}>", "max_tokens": 1}
    async with make_client(make_app(frontend, trust_request_chat_template=True)) as client:
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert bytes(frontend.asked[-1][0]) == b"<be>"
        counted = await client.post("/tokenize", json={"messages": TALK, "chat_template": "12"})
        assert counted.json()["tokens"] == [*b"12"]
        refused = await client.post("/v1/chat/completions", json={**body, "chat_template": "{{ 1 + 'a' }}"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    assert frontend.read_elsewhere == ["chat", "tokenize", "chat"]


async def test_a_short_body_of_which_much_is_written_is_for_the_helper(
    client: httpx.AsyncClient, frontend: FakeFrontend
) -> None:
    body = {"query": "x" * 90, "documents": ["a"] * 10}
    short = await client.post("/rerank", json={**body, "instruction": None})
    assert (short.status_code, frontend.read_elsewhere) == (200, [])
    frontend.serve("embed", score_type="bi-encoder", score_template="x" * 2000)
    long = await client.post("/rerank", json=body)
    assert (long.status_code, frontend.read_elsewhere) == (200, ["rerank"])


async def test_a_body_counts_as_being_read_while_it_waits_for_the_helper(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    read = FakeLongBodies.read

    async def watched(*arguments: Any, **named: Any) -> Any:
        taken.append(BODY_MEMORY.taken)
        return await read(*arguments, **named)

    monkeypatch.setattr(FakeLongBodies, "read", watched)
    before, body = BODY_MEMORY.taken, json.dumps({"prompt": " " * LONG + "a" * 99_000}).encode()
    headers = {"content-type": "application/json"}
    assert (await client.post("/tokenize", content=body, headers=headers)).status_code == 400
    assert (taken, BODY_MEMORY.taken) == ([before + len(body)], before)


@pytest.mark.parametrize(
    ("path", "most"),
    [("/v1/completions", 4 << 20), ("/tokenize", 4 << 20), ("/abort", 1 << 20), ("/v1/embeddings", 16 << 20)],
)
async def test_the_longest_body(client: httpx.AsyncClient, path: str, most: int) -> None:
    too_long = await client.post(
        path, content=b" " * (most + 1), headers={"content-type": "application/json"}
    )
    assert too_long.status_code == 413
    assert f"at most {most} bytes" in too_long.json()["error"]["message"]
    longest = await client.post(path, content=b" " * most, headers={"content-type": "application/json"})
    assert longest.status_code == 400


async def test_many_values_for_an_endpoint_without_texts(client: httpx.AsyncClient) -> None:
    answer = await client.post("/abort", json={"request_ids": [""] * 50_000})
    assert answer.status_code == 400
    assert "at most 20000 values" in answer.json()["error"]["message"]
