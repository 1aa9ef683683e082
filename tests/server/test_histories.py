"""Histories of coding agents are answered whatever a model, its tools or another server did to them.

`histories.json` has a session of Claude Code, which speaks Messages, of Codex, which speaks Responses, and of
opencode, which speaks chat completions, or Ollama's chat. Damage is done by rules drawn from a seed, and only
to what the assistant and its tools have written.
"""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
import pytest
from fake_api import make_app, make_client
from fake_frontend import FakeFrontend, byte_tokenizer

from server.options.server_flags import BatchOptions

Body = dict[str, Any]
Place = tuple[list[Any], int]
"""A list of a body, and the index of an entry that a model or a tool has written."""

_KNOWN = json.loads(Path(__file__).with_name("histories.json").read_text())
JUNK, BROKEN, FOREIGN = _KNOWN["junk"], _KNOWN["broken"], _KNOWN["foreign"]
"""Values in place of a field, what is no object in JSON, and entries as other servers write them."""


def as_ollama(session: Body) -> Body:
    """A session of opencode in Ollama's form, where calls have no ids and arguments are objects."""
    body = copy.deepcopy(session)
    for message in body["messages"]:
        content = message["content"] or ""
        message["content"] = content if isinstance(content, str) else content[0]["text"]
        message["thinking"] = message.pop("reasoning_content", "")
        if message.pop("tool_call_id", None):
            message |= {"tool_name": "read", "images": []}
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            del call["id"], call["type"]
    options = {"num_predict": body.pop("max_tokens")}
    return {**body, "options": options, "stream": False}


OPENCODE = _KNOWN["sessions"]["/v1/chat/completions"]
SESSIONS: dict[str, Body] = {**_KNOWN["sessions"], "/api/chat": as_ollama(OPENCODE)}
"""The session of an agent by the path that it asks."""


def written(path: str, body: Body) -> list[Place]:
    if path == "/v1/responses":
        items = body["input"]
        return [(items, n) for n, item in enumerate(items) if item.get("role") in (None, "assistant")]
    found: list[Place] = []
    for number, message in enumerate(body["messages"]):
        by_model = message["role"] in ("assistant", "tool")
        if by_model and path != "/v1/messages":
            found.append((body["messages"], number))
        for inside in (message.get("content"), message.get("tool_calls")):
            for n, part in enumerate(inside if isinstance(inside, list) else ()):
                if by_model or (isinstance(part, dict) and "tool_use_id" in part):
                    found.append((inside, n))
    return found


def spoil_a_field(entries: list[Any], at: int, random: Random) -> None:
    """A field is gone, or is something else."""
    node = entries[at]
    while isinstance(node, dict):
        names = [name for name in node if name not in ("role", "tool_use_id")]
        if not names:
            return
        name = random.choice(names)
        if isinstance(node[name], dict) and random.random() < 0.7:
            node = node[name]
            continue
        if random.random() < 0.3:
            del node[name]
        else:
            node[name] = random.choice(JUNK)
        return


def drop(entries: list[Any], at: int, random: Random) -> None:
    del entries[at]


def double(entries: list[Any], at: int, random: Random) -> None:
    entries.insert(random.randrange(len(entries) + 1), copy.deepcopy(entries[at]))


def move(entries: list[Any], at: int, random: Random) -> None:
    entries.insert(random.randrange(len(entries)), entries.pop(at))


def break_arguments(path: str, body: Body, random: Random) -> None:
    for entries, at in random.sample(places := written(path, body), len(places)):
        node = entries[at]
        node = node.get("function") or node if isinstance(node, dict) else node
        names = [name for name in ("arguments", "input") if isinstance(node, dict) and name in node]
        if names:
            node[names[0]] = random.choice(BROKEN)
            return


def insert_foreign(path: str, body: Body, random: Random) -> None:
    if places := written(path, body):
        entries, at = random.choice(places)
        known = FOREIGN["/v1/chat/completions" if path == "/api/chat" else path]
        entries.insert(at, copy.deepcopy(random.choice(known)))


def insert_system(path: str, body: Body, random: Random) -> None:
    said = body["input" if path == "/v1/responses" else "messages"]
    said.insert(random.randrange(1, len(said) + 1), {"role": "system", "content": "Be brief."})


def ask_for_foreign_tools(path: str, body: Body, random: Random) -> None:
    tool = {"type": random.choice(("web_search", "computer_use_preview", "mcp", "wish")), "name": "x"}
    body["tools"] = [*body["tools"], tool] if random.random() < 0.7 else [tool]


def at_a_place(damage: Callable[[list[Any], int, Random], None]) -> Callable[[str, Body, Random], None]:
    """The damage to one entry that a model or a tool has written."""

    def done(path: str, body: Body, random: Random) -> None:
        if places := written(path, body):
            damage(*random.choice(places), random)

    return done


DAMAGES = (
    *map(at_a_place, (spoil_a_field, spoil_a_field, drop, double, move)),
    *(break_arguments, break_arguments, insert_foreign, insert_system, ask_for_foreign_tools),
)


def damaged(path: str, random: Random) -> Body:
    """A session with one to four things wrong in what models and tools wrote."""
    body = copy.deepcopy(SESSIONS[path])
    for _ in range(random.randrange(1, 5)):
        random.choice(DAMAGES)(path, body, random)
    return body


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


def bodies(path: str, seeds: range) -> list[Body]:
    return [damaged(path, Random(seed)) for seed in seeds]


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> httpx.Response:
    return await client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


@pytest.mark.parametrize("path", SESSIONS)
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
        answer = await client.post("/v1/chat/completions", json=OPENCODE)
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
