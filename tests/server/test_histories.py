"""Histories of coding agents are answered whatever a model, its tools or another server did to them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import agent_histories
import httpx
import msgspec
import pytest
from fake_api import make_app, make_client
from fake_frontend import FakeFrontend, byte_tokenizer

from server.options.server_flags import BatchOptions

TOLERANT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
OBJECTS = (
    "{% for m in messages %}<{{ m.role }}>{{ (m.reasoning_content or '') + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<' + c.function.name }}"
    "{% for key, value in c.function.arguments | items %}{{ key + '=' }}{{ value | tojson }}{% endfor %}>"
    "{% endfor %}{% endfor %}"
)
"""Wants texts as texts, and arguments as objects."""
STRICT = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% set messages = messages[1:] %}{% endif %}{% set n = namespace(i=0) %}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('one system') }}{% endif %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (n.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set n.i = n.i + 1 %}{% endif %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
    "{{ raise_exception('one call at once') }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('ids') }}{% endif %}"
    "{{ c | tojson }}{% endfor %}{{ m.role + m.content }}{% endfor %}"
)
"""Takes turns of users and the assistant, one system, and one call at once with an id of its own form."""
TEMPLATES = {"tolerant": TOLERANT, "objects": OBJECTS, "strict": STRICT}


@pytest.fixture(params=TEMPLATES)
def frontend(request: pytest.FixtureRequest) -> FakeFrontend:
    found = FakeFrontend(reply="ok")
    found.tokenizer = byte_tokenizer(template=TEMPLATES[request.param])
    found.facts = msgspec.structs.replace(found.facts, max_model_len=1 << 20)
    return found


@pytest.fixture
async def client(frontend: FakeFrontend, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    options = BatchOptions(batch_dir=str(tmp_path), response_store=600)
    async with make_client(make_app(frontend, batches=options)) as client:
        yield client


def bodies(path: str, seeds: range) -> list[dict[str, Any]]:
    made = ((agent_histories.AGENTS[path](random), random) for random in map(Random, seeds))
    return [agent_histories.damaged(path, body, random) for body, random in made]


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> httpx.Response:
    return await client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


@pytest.mark.parametrize("path", agent_histories.AGENTS)
async def test_none_of_500_damaged_histories_is_refused(client: httpx.AsyncClient, path: str) -> None:
    refused: list[str] = []
    for seed, body in enumerate(bodies(path, range(42))):
        answer = await post(client, path, body)
        if answer.status_code != 200:
            refused.append(f"{seed}: {answer.status_code} {answer.text}")
    assert refused == []


async def test_histories_of_kept_responses_are_not_refused(client: httpx.AsyncClient) -> None:
    for seed, body in enumerate(bodies("/v1/responses", range(1000, 1010))):
        items = body["input"]
        first = await post(client, "/v1/responses", {**body, "input": items[:4], "store": True})
        assert first.status_code == 200, (seed, first.text)
        more = {"input": [*items[4:], {"role": "user", "content": "so?"}], "store": True}
        more["previous_response_id"] = first.json()["id"]
        second = await post(client, "/v1/responses", {**body, **more})
        assert second.status_code == 200, (seed, second.text)


async def test_an_undamaged_history_has_no_warning_of_repairs(frontend: FakeFrontend) -> None:
    frontend.tokenizer = byte_tokenizer(template=TOLERANT)
    async with make_client(make_app(frontend)) as client:
        answer = await client.post("/v1/chat/completions", json=agent_histories.opencode(Random(1)))
    assert answer.status_code == 200 and "repaired" not in answer.headers["warning"]


@pytest.mark.parametrize("said", ["<think>a</think>b", " ", [{"type": "text", "text": None}]])
async def test_an_answer_that_cannot_go_on_with_the_last_message_follows_it(said: Any) -> None:
    frontend = FakeFrontend()
    short = "{% for m in messages %}<{{ m.content.split('</think>')[1:] }}>{% endfor %}"
    frontend.tokenizer = byte_tokenizer(template=short + "{% if add_generation_prompt %}:{% endif %}")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": said}]
    async with make_client(make_app(frontend)) as client:
        body = {"model": "tiny", "max_tokens": 1, "messages": messages}
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            assert (await post(client, path, body)).status_code == 200
    assert bytes(frontend.asked[-1][0]).endswith(b">:")
