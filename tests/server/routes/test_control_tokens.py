"""Control tokens in messages are ordinary text to all endpoints with conversations, and not in prompts."""

from typing import Any

import httpx
import pytest
from fake_frontend import BOS, EOS, FakeFrontend, byte_tokenizer

SAID = [{"role": "user", "content": "a<eos>b"}]
WRITTEN = [*b"<user>a<eos>b\n<assistant>"]


@pytest.mark.parametrize(
    ("path", "body", "prompt"),
    [
        ("/v1/chat/completions", {"messages": SAID}, WRITTEN),
        ("/v1/responses", {"input": "a<eos>b"}, WRITTEN),
        ("/v1/messages", {"messages": SAID, "model": "tiny", "max_tokens": 9}, WRITTEN),
        ("/api/chat", {"messages": SAID, "model": "tiny"}, WRITTEN),
        ("/api/generate", {"prompt": "a<eos>b", "model": "tiny"}, WRITTEN),
        ("/v1/completions", {"prompt": "a<eos>b"}, [BOS, *b"a", EOS, *b"b"]),
        ("/api/generate", {"prompt": "a<eos>b", "model": "tiny", "raw": True}, [BOS, *b"a", EOS, *b"b"]),
    ],
)
async def test_prompts(
    frontend: FakeFrontend, client: httpx.AsyncClient, path: str, body: dict[str, Any], prompt: list[int]
) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert frontend.asked[0][0] == prompt


async def test_they_are_counted_so(client: httpx.AsyncClient) -> None:
    tokens = (await client.post("/tokenize", json={"messages": SAID})).json()["tokens"]
    assert tokens == WRITTEN
    counted = await client.post("/v1/messages/count_tokens", json={"messages": SAID, "model": "tiny"})
    assert counted.json()["input_tokens"] == len(WRITTEN)


async def test_an_echo_shows_no_marks(client: httpx.AsyncClient) -> None:
    body = {"messages": SAID, "echo": True, "add_generation_prompt": False, "continue_final_message": True}
    answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["message"]["content"].startswith("a<eos>b")


async def test_pooled_conversations(
    frontend: FakeFrontend, client: httpx.AsyncClient, embedder: None
) -> None:
    for fields in ({}, {"truncate_prompt_tokens": 8}):
        answer = await client.post("/v1/embeddings", json={"messages": SAID, **fields})
        assert answer.status_code == 200, answer.text
    assert [items[0].tokens for items, _ in frontend.pooled] == [[*b"<user>a<eos>b\n"], [*b"<user>a<"]]


async def test_a_prompt_cut_to_its_end(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    body = {"messages": SAID, "truncate_prompt_tokens": 18}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert frontend.asked[0][0] == WRITTEN[-18:]


async def test_they_stay_special_if_the_operator_wants_them(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    frontend.tokenizer = byte_tokenizer(special_in_messages=True)
    assert (await client.post("/v1/chat/completions", json={"messages": SAID})).status_code == 200
    assert frontend.asked[0][0] == [*b"<user>a", EOS, *b"b\n<assistant>"]
