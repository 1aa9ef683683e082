"""Long bodies, whose texts a helper reads: the answers are those to the same bodies if they were short."""

import json
from typing import Any

import httpx
import pytest
from fake_api import make_app, make_client
from fake_frontend import FakeFrontend, FakeLongBodies

from server.http.connection.body_limits import BODY_MEMORY
from server.request_limits import Limits
from server.schemas.body import LONG

TALK = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": ["a", {"type": "text", "text": "b"}]},
]


@pytest.fixture(autouse=True)
def served(frontend: FakeFrontend) -> None:
    tasks = ("generate", "embed", "token_embed", "classify")
    frontend.serve(*tasks, score_type="bi-encoder", limits=Limits(inputs=10))


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
