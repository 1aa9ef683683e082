"""Where the time went, as each route tells it: in headers, in `usage`, in the last chunk of a stream."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from fake_api import make_app, make_client, post, post_stream
from fake_frontend import FakeFrontend
from starlette.types import ASGIApp

from engine_core.engine_stats import Timing
from server.errors import Overloaded
from server.options.server_flags import ReportOptions

TEXT = ("/v1/completions", {"prompt": "hi", "max_tokens": 20})
TALK = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20})
GENERATING = pytest.mark.parametrize(("path", "body"), [TEXT, TALK])
POOLING = [
    ("/v1/embeddings", {"input": ["a", "bc"]}),
    ("/v1/embeddings", {"input": "a", "encoding_format": "bytes"}),
    ("/v2/embed", {"texts": ["a"], "input_type": "query"}),
    ("/pooling", {"input": "a"}),
    ("/embed", {"inputs": "a"}),
    ("/embed_all", {"inputs": "a"}),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}),
    ("/score", {"text_1": "a", "text_2": "b"}),
    ("/rerank", {"query": "a", "documents": ["b", "c"]}),
]
CLASSIFYING = [("/classify", {"input": "a"}), ("/predict", {"inputs": "a"})]

PARTS = ("tokenize", "queue", "prefill", "decode", "answer")
TIMING = Timing(queued=0.25, prefill=0.125, decode=0.0625, preemptions=1, steps=3, compute=0.5)
EXPECTED = "x-facet-expected-first-token-ms"


@pytest.fixture(autouse=True)
def timed(frontend: FakeFrontend, embedder: None) -> None:
    frontend.serve("generate", "embed", "token_embed", score_type="bi-encoder")
    frontend.timing = TIMING
    frontend.cached = 1


def durations(response: httpx.Response) -> dict[str, float]:
    entries = [entry.partition(";dur=") for entry in response.headers["server-timing"].split(", ")]
    return {name: float(value) for name, _, value in entries}


def check(parts: dict[str, float], suffix: str = "") -> None:
    """The parts add up to the total, in microseconds."""
    total = sum(round(1000 * parts[part + suffix]) for part in PARTS)
    assert total == round(1000 * parts["total" + suffix])
    assert [parts[part + suffix] for part in ("queue", "prefill", "decode")] == [250, 125, 62.5]
    assert 0 <= parts["tokenize" + suffix] < 5000


@pytest.mark.parametrize(("path", "body"), [TEXT, TALK, *POOLING, *CLASSIFYING])
async def test_every_answer_has_the_header(
    frontend: FakeFrontend, client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    if (path, body) in CLASSIFYING:
        frontend.serve("classify")
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    parts = durations(response)
    assert list(parts) == [*PARTS, "compute", "total"]
    check(parts)
    assert parts["compute"] == 500 * max(1, len(frontend.pooled[-1][0]) if frontend.pooled else 1)
    assert EXPECTED not in response.headers
    assert b"timing" not in response.content
    frontend.expected = 0.25
    assert (await client.post(path, json=body)).headers[EXPECTED] == "250.0"


@pytest.mark.parametrize("path", ["/tokenize", "/v1/models"])
async def test_other_answers_have_none(client: httpx.AsyncClient, path: str) -> None:
    method = "GET" if path == "/v1/models" else "POST"
    response = await client.request(method, path, json={"prompt": "a"} if method == "POST" else None)
    assert response.status_code == 200
    assert "server-timing" not in response.headers


async def test_an_error_has_none(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.error = Overloaded("full", retry_after=3)
    path, body = TEXT
    assert "server-timing" not in (await client.post(path, json=body)).headers


@pytest.mark.parametrize(
    ("path", "body"), [TEXT, TALK, POOLING[0], ("/score", {"text_1": "a", "text_2": "b"}), POOLING[-2]]
)
async def test_usage_has_the_times_where_they_are_asked_for(
    frontend: FakeFrontend, client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    frontend.expected = 0.25
    asked = (await post(client, path, **body, include=["timing"]))["usage"]["timing"]
    async with make_client(make_app(frontend, reports=ReportOptions(enable_timing=True))) as enabled:
        always = (await post(enabled, path, **body))["usage"]["timing"]
    texts = len(frontend.pooled[-1][0]) if frontend.pooled else 1
    for timing in (asked, always):
        check(timing, "_ms")
        del timing["total_ms"], timing["tokenize_ms"], timing["answer_ms"]
        assert timing == {
            "queue_ms": 250,
            "prefill_ms": 125,
            "decode_ms": 62.5,
            "compute_ms": 500 * texts,
            "steps": 3 * texts,
            "preemptions": texts,
            "cached_tokens": texts,
            "expected_first_token_ms": 250,
        }


async def test_the_metadata_of_bytes_has_them_too(client: httpx.AsyncClient) -> None:
    path, body = POOLING[1]
    response = await client.post(path, json={**body, "include": ["timing"]})
    check(json.loads(response.headers["metadata"])["usage"]["timing"], "_ms")


async def test_choices_and_prompts_share_the_times(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "temperature": 1, "include": ["timing"]}
    timing = (await post(client, TEXT[0], **body))["usage"]["timing"]
    check(timing, "_ms")
    assert (timing["compute_ms"], timing["steps"], timing["cached_tokens"]) == (2000, 12, 2)


async def test_a_stop_string_ends_the_times_with_the_text(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    response = await client.post(TEXT[0], json={**TEXT[1], "stop": "wor"})
    assert response.json()["choices"][0]["text"] == "Hello, "
    check(durations(response))


# Streams


@GENERATING
async def test_the_chunk_of_the_usage_has_the_times(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    options = {"stream_options": {"include_usage": True}}
    *chunks, last = await post_stream(client, path, **body, **options, include=["timing"])
    assert last["choices"] == []
    check(last["usage"]["timing"], "_ms")
    assert not any("usage" in chunk for chunk in chunks)
    *chunks, last = await post_stream(client, path, **body, **options)
    assert "timing" not in last["usage"]


@GENERATING
@pytest.mark.parametrize("by_flag", [True, False])
async def test_no_chunk_is_added_for_the_times(
    frontend: FakeFrontend, path: str, body: dict[str, Any], by_flag: bool
) -> None:
    """Clients that did not ask for the usage may rely on a choice in every chunk."""
    asked = {} if by_flag else {"include": ["timing"]}
    async with make_client(make_app(frontend, reports=ReportOptions(enable_timing=by_flag))) as client:
        *chunks, last = await post_stream(client, path, **body, **asked, n=2, temperature=1)
    assert last["choices"][0]["finish_reason"] == "stop"
    check(last["usage"]["timing"], "_ms")
    assert last["usage"]["completion_tokens"] == 28
    assert not any("usage" in chunk for chunk in chunks)


@GENERATING
async def test_usage_in_every_chunk_has_the_times_once(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last = await post_stream(client, path, **body, **options, include=["timing"])
    assert all("timing" not in chunk["usage"] for chunk in chunks)
    check(last["usage"]["timing"], "_ms")


@GENERATING
async def test_a_stream_that_begins_at_once_says_what_was_expected(
    frontend: FakeFrontend, client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    frontend.expected = 0.0125
    response = await client.post(path, json={**body, "stream": True})
    assert response.headers[EXPECTED] == "12.5"
    assert "server-timing" not in response.headers


async def messages_until_asked(app: ASGIApp, path: str, body: dict[str, Any], count: int) -> list[Any]:
    """The first messages to the HTTP server of a stream that is then left."""
    sent: list[Any] = []
    enough = asyncio.Event()
    pending = [{"type": "http.request", "body": json.dumps({**body, "stream": True}).encode()}]

    async def receive() -> Any:
        if not pending:
            await enough.wait()
            return {"type": "http.disconnect"}
        return pending.pop()

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) >= count:
            enough.set()

    scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": "POST", "path": path}
    scope |= {
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
        "query_string": b"",
    }
    async with asyncio.timeout(60):
        await app(scope, receive, send)
    return sent


@GENERATING
async def test_a_stream_that_waits_sends_its_head_before_the_first_token(
    frontend: FakeFrontend, app: ASGIApp, path: str, body: dict[str, Any]
) -> None:
    frontend.waits, frontend.expected, frontend.delay = True, 2.5, 60.0
    begun = asyncio.get_running_loop().time()
    head, nothing = await messages_until_asked(app, path, body, 2)
    assert asyncio.get_running_loop().time() - begun < 0.9, "not by the timer that opens late streams"
    assert head["status"] == 200
    assert dict(head["headers"])[EXPECTED.encode()] == b"2500.0"
    assert (nothing["body"], nothing["more_body"]) == (b"", True)


@pytest.mark.parametrize(("path", "body"), [TEXT, POOLING[0]])
async def test_times_are_told_in_headers_of_their_own_where_the_operator_wants_them(
    frontend: FakeFrontend, client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    plain = await client.post(path, json=body)
    assert not [name for name in plain.headers if name.startswith("x-facet-")]
    app = make_app(frontend, reports=ReportOptions(enable_timing_headers=True))
    async with make_client(app) as enabled:
        told = (await enabled.post(path, json=body)).headers
        listed = (await enabled.get("/v1/models")).headers
        stream = (await enabled.post(TEXT[0], json={**TEXT[1], "stream": True})).headers
    texts = len(frontend.pooled[-1][0]) if frontend.pooled else 1
    expected = {
        "queue-ms": "250.000",
        "prefill-ms": "125.000",
        "decode-ms": "62.500",
        "cached-tokens": f"{texts}",
    }
    assert {name: told[f"x-facet-{name}"] for name in expected} == expected
    assert "x-facet-queue-ms" not in listed and "x-facet-queue-ms" not in stream
