"""Answers of every generating endpoint: how they begin, pause, break off, and are left by their clients."""

import asyncio
from typing import Any

import httpx
import pytest
from fake_api import events, leave, make_app, make_client, post, post_stream
from fake_frontend import FakeFrontend
from model_facts import changed
from starlette.types import ASGIApp

from engine_core.protocol import Standing
from server.access.admission import Admission
from server.access.request_state import state_of
from server.errors import Unavailable
from server.http import sse

TEXT = ("/v1/completions", {"prompt": "hi", "max_tokens": 20})
TEXTS = ("/v1/completions", {"prompt": ["hi", "you"], "n": 2, "temperature": 1, "max_tokens": 20})
TALK = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20})
ENDPOINTS = pytest.mark.parametrize(("path", "body"), [TEXT, TEXTS, TALK])
OTHERS = [
    ("/v1/messages", {"model": "tiny", **TALK[1]}),
    ("/v1/responses", {"input": "hi"}),
    ("/api/chat", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}),
]


# Tokens that bring no text yet


@pytest.mark.parametrize(("path", "body"), [TEXT, TALK])
async def test_answers_and_all_their_chunks_have_the_fingerprint(
    frontend: FakeFrontend, client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    frontend.facts = changed(frontend.facts, fingerprint="fp_1")
    chunks = await post_stream(client, path, **body, stream_options={"include_usage": True})
    assert {answer["system_fingerprint"] for answer in (await post(client, path, **body), *chunks)} == {
        "fp_1"
    }


# Clients that do not read


@pytest.mark.parametrize(("path", "body"), [TEXT, TALK])
async def test_a_connection_can_tell_that_a_stream_is_not_read(
    frontend: FakeFrontend, app: ASGIApp, path: str, body: dict[str, Any]
) -> None:
    followed: list[Any] = []

    async def connection(scope: Any, receive: Any, send: Any) -> None:
        state_of(scope).follow_reader = followed.append
        await app(scope, receive, send)

    async with make_client(connection) as client:
        assert (await client.post(path, json=body)).status_code == 200
        assert followed == []  # a whole answer is generated before it is written
        assert (await client.post(path, json={**body, "stream": True})).status_code == 200
    [tell] = followed
    tell(True)
    tell(False)
    (paused, yes), (resumed, no) = frontend.flow
    assert (yes, no) == (True, False) and paused is resumed


# Going away


@pytest.mark.parametrize(("path", "body"), [TEXT, TEXTS, TALK, *OTHERS])
@pytest.mark.parametrize("after", [0, 1])
async def test_a_client_that_leaves_its_stream_ends_it_in_the_engine(
    frontend: FakeFrontend, app: ASGIApp, path: str, body: dict[str, Any], after: int
) -> None:
    frontend.gate = asyncio.Event()
    frontend.delay = 0.0 if after else 60.0
    pieces = await asyncio.wait_for(leave(app, path, {**body, "stream": True}, after=after), 60)
    assert (frontend.running, frontend.finished) == (0, 0)
    assert frontend.most_running == (2 if path == TEXTS[0] and isinstance(body.get("prompt"), list) else 1)
    assert bool(pieces) == bool(after)
    assert not any(b"[DONE]" in piece for piece in pieces)
    assert b'status="%s"' % (b"2xx" if after else b"4xx") in frontend.metrics.page()
    assert b'status="5xx"' not in frontend.metrics.page()


@ENDPOINTS
async def test_a_client_that_leaves_before_its_answer_ends_it_in_the_engine(
    frontend: FakeFrontend, app: ASGIApp, path: str, body: dict[str, Any]
) -> None:
    frontend.gate = asyncio.Event()
    pieces = await asyncio.wait_for(leave(app, path, body, after=0), 60)
    assert pieces == []
    assert (frontend.running, frontend.finished) == (0, 0)
    assert frontend.most_running >= 1


@pytest.mark.parametrize(("path", "body"), [TEXT, TALK, ("/api/generate", {"model": "tiny", "prompt": "hi"})])
async def test_a_client_that_splits_lines_as_unicode_does_gets_whole_events(
    frontend: FakeFrontend, client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    frontend.reply, frontend.per_step = "a\u2028b\u2029c\x85d\u00e9", 20
    text = (await client.post(path, json={**body, "stream": True})).text
    assert text.splitlines() == text.removesuffix("\n").split("\n")
    assert r"a\u2028b\u2029c\u0085d" in text and "\u00e9" in text


# Breaking off


async def test_a_bug_in_a_stream_tells_nothing_of_itself(
    frontend: FakeFrontend, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    frontend.error = RuntimeError("secret /path")  # pyright: ignore[reportAttributeAccessIssue]
    frontend.tokens_before_error = 3
    path, body = TALK
    response = await client.post(path, json={**body, "stream": True})
    assert events(response.text)[-1]["error"]["type"] == "InternalServerError"
    assert "secret" not in response.text
    assert "secret" in caplog.text


# Silence


async def test_a_late_stream_opens_before_its_first_token(
    frontend: FakeFrontend, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "OPEN_AFTER", 0.01)
    frontend.delay = 0.05
    frontend.error = Unavailable("too late for a status")
    path, body = TEXT
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200
    assert events(response.text) == [frontend.error.body()]


async def test_comments_can_be_switched_off(frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "OPEN_AFTER", 0.01)
    frontend.delay = 0.05
    path, body = TEXT
    async with make_client(make_app(frontend, sse_keep_alive_interval=0)) as client:
        assert "keep-alive" not in (await client.post(path, json={**body, "stream": True})).text


@pytest.mark.parametrize(
    ("standing", "words"),
    [
        (Standing(1, 12, 0, 9000), "waiting 12 ahead"),
        (Standing(1, -1, 4096, 9000), "reading 4096 of 9000"),
        (Standing(1, -1, 8999, 9000), "keep-alive"),
        (None, "keep-alive"),
    ],
)
async def test_comments_say_what_a_stream_waits_for(
    frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch, standing: Standing | None, words: str
) -> None:
    async def tell(admission: Admission) -> Standing | None:
        return standing

    monkeypatch.setattr(sse, "OPEN_AFTER", 0.01)
    monkeypatch.setattr(Admission, "standing", tell)
    frontend.delay = 0.1
    path, body = TEXT
    async with make_client(make_app(frontend, sse_keep_alive_interval=0.02)) as client:
        text = (await client.post(path, json={**body, "stream": True})).text
    comments, found, rest = text.rpartition(f": {words}\n\n")
    assert found
    assert set(comments.split("\n\n")) <= {f": {words}", ""} and events(rest)[-1] == "[DONE]"
