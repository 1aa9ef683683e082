"""text-generation-inference's endpoints, and what is posted to `/`."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from fake_api import assert_the_same_if_long, leave, make_app, make_client, post
from fake_frontend import EOS, FakeFrontend, vectors
from starlette.types import ASGIApp

from server.errors import Overloaded
from server.options.server_config import AccessOptions


async def stream(client: httpx.AsyncClient, path: str, **body: Any) -> list[Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-1]]


async def test_a_whole_text(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    assert await post(client, "/generate", inputs="hi") == {"generated_text": "Hello, world."}
    assert frontend.asked[-1][1].temperature == 0
    parameters = {"details": True, "return_full_text": True, "do_sample": True, "seed": 3, "top_k": 5}
    answer = await post(client, "/generate", inputs="hi", parameters=parameters)
    assert answer["generated_text"] == "hiHello, world."
    details = answer["details"]
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("eos_token", 14, 3)
    tokens = details["tokens"]
    assert "".join(token["text"] for token in tokens) == "Hello, world."
    assert [token["id"] for token in tokens] == [*b"Hello, world.", EOS]
    assert [token["special"] for token in tokens] == [False] * 13 + [True]
    assert tokens[0]["logprob"] == -0.5 and frontend.asked[-1][1].temperature is None


@pytest.mark.parametrize("per_step", [1, 3, 1000])
@pytest.mark.parametrize("reply", ["Hello, world.", "Grüße 🙂", ""])
async def test_a_stream_says_the_same(
    frontend: FakeFrontend, client: httpx.AsyncClient, per_step: int, reply: str
) -> None:
    frontend.per_step, frontend.reply = per_step, reply
    parameters = {"details": True}
    whole = await post(client, "/generate", inputs="hi", parameters=parameters)
    events = await stream(client, "/generate_stream", inputs="hi", parameters=parameters)
    assert "".join(event["token"]["text"] for event in events) == whole["generated_text"] == reply
    assert events[-1]["generated_text"] == reply
    assert [event["index"] for event in events] == list(range(1, len(events) + 1))
    assert all(event["generated_text"] is None and event["details"] is None for event in events[:-1])
    assert events[-1]["details"]["finish_reason"] == "eos_token"
    assert events[-1]["details"]["generated_tokens"] == whole["details"]["generated_tokens"]


async def test_reasons_and_parameters(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    for parameters, reason in (({"stop": [","]}, "stop_sequence"), ({"max_new_tokens": 2}, "length")):
        asked = {**parameters, "details": True}
        events = await stream(client, "/generate_stream", inputs="hi", parameters=asked)
        assert events[-1]["details"]["finish_reason"] == reason
    grammar = {"type": "json", "value": {"type": "object"}}
    await post(client, "/generate", inputs="x" * 300, parameters={"grammar": grammar, "truncate": 5})
    assert frontend.checked[-1].params.json == {"type": "object"}  # type: ignore[union-attr]
    assert len(frontend.asked[-1][0]) == 5
    await post(client, "/generate", inputs="a", parameters={"grammar": {"type": "regex", "value": "a+"}})
    assert frontend.checked[-1].params.regex == "a+"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"inputs": 5}, "inputs"),
        ({"inputs": "a", "parameters": {"max_new_tokens": 0}}, "max_tokens"),
        ({"inputs": "a", "parameters": {"watermark": True}}, "watermark"),
        ({"inputs": "a", "parameters": {"warmth": 1}}, "warmth"),
        ({"parameters": {}}, "inputs"),
    ],
)
async def test_a_wrong_body_gets_one_sentence(
    client: httpx.AsyncClient, body: dict[str, Any], word: str
) -> None:
    for path in ("/generate", "/"):
        response = await client.post(path, json=body)
        error = response.json()
        assert (response.status_code, error["error_type"]) == (400, "validation")
        assert word in error["error"] and "\n" not in error["error"]


async def test_a_stream_that_breaks_off(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.error, frontend.tokens_before_error = Overloaded("Not now."), 6
    events = await stream(client, "/generate_stream", inputs="hi")
    assert events[-1] == {"error": "Not now.", "error_type": "overloaded"}


async def test_a_client_that_leaves_ends_the_request(app: ASGIApp, frontend: FakeFrontend) -> None:
    frontend.gate = asyncio.Event()
    await asyncio.wait_for(leave(app, "/", {"inputs": "hi", "stream": True}, after=1), 60)
    assert (frontend.running, frontend.finished) == (0, 0)


@pytest.mark.parametrize("body", [{"inputs": "hi"}, {"inputs": "hi", "parameters": {"top_k": "x"}}])
async def test_long_bodies_are_answered_alike(
    client: httpx.AsyncClient, frontend: FakeFrontend, body: dict[str, Any]
) -> None:
    await assert_the_same_if_long(client, frontend, "/generate", body)


async def test_the_root_of_a_model_that_generates(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.serve("generate", "embed", score_type="bi-encoder")
    assert await post(client, "/", inputs="hi") == [{"generated_text": "Hello, world."}]
    assert len(await stream(client, "/", inputs="hi", stream=True, parameters={})) == 14
    assert await post(client, "/", inputs=["hi", "ho"]) == await post(client, "/embed", inputs=["hi", "ho"])
    compared = {"source_sentence": "a", "sentences": ["a", "b"]}
    assert len(await post(client, "/", inputs=compared, parameters={})) == 2
    assert len(await post(client, "/", query="a", texts=["b", "c"])) == 2


async def test_the_root_of_other_models(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.serve("embed")
    assert await post(client, "/", inputs="hi") == await post(client, "/embed", inputs="hi")
    frontend.serve("classify")
    frontend.answer_of = lambda item: vectors([0.25, 0.75])
    assert await post(client, "/", inputs="hi", parameters={}) == await post(client, "/predict", inputs="hi")


async def test_the_root_is_read_without_a_key_and_answers_with_one_only(frontend: FakeFrontend) -> None:
    options = AccessOptions(api_key=["secret"])
    async with make_client(make_app(frontend, access=options)) as client:
        got, asked = await client.get("/"), await client.head("/")
        assert (got.status_code, asked.status_code) == (200, 200)
        assert asked.headers["content-length"] == got.headers["content-length"]
        assert (await client.post("/", json={"inputs": "hi"})).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert (await client.post("/", json={"inputs": "hi"}, headers=headers)).status_code == 200


async def test_options_that_bring_a_path_are_named() -> None:
    async with make_client(make_app(FakeFrontend(), disable_page=True)) as client:
        page = await client.get("/")
        assert (
            page.status_code == 404 and "--disable-page has turned it off" in page.json()["error"]["message"]
        )
        order = await client.post("/collective_rpc", json={})
        assert order.status_code == 404 and "with --server-dev-mode" in order.json()["error"]["message"]


async def test_the_description_is_that_of_both(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    described = (await client.get("/info")).json()
    assert (described["max_total_tokens"], described["max_input_tokens"]) == (128, 127)
    frontend.serve("embed")
    assert "max_total_tokens" not in (await client.get("/info")).json()
