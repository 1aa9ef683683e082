"""Endpoints: how each request passes them, by the table of plain paths and by FastAPI."""

# pyright: reportPrivateUsage=false
import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from fake_api import make_app, make_client, post_scope
from fake_frontend import FakeFrontend
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.routing import APIRoute

from server.access.request_state import KEY
from server.errors import BadRequest
from server.http.endpoint import Endpoint, PathTable
from server.http.error_answers import CLIENT_GONE
from server.schemas.tokenize import TokenizeRequest

COMPLETIONS = "/v1/completions"


@pytest.fixture
def frontend() -> FakeFrontend:
    return FakeFrontend()


@pytest.fixture
async def client(frontend: FakeFrontend) -> AsyncIterator[httpx.AsyncClient]:
    async with make_client(make_app(frontend)) as client:
        yield client


async def test_fastapi_tries_no_route_by_its_expression_to_find_a_plain_path(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no route was to be tried")

    monkeypatch.setattr(APIRoute, "matches", broken)
    assert (await client.post(COMPLETIONS, json={"prompt": "hi"})).status_code == 200
    assert (await client.get("/live")).status_code == 200
    with pytest.raises(RuntimeError):
        await client.get("/v1/models/org/tiny")  # a path with a parameter


async def test_an_endpoint_answers_the_same_when_fastapi_runs_it() -> None:
    """The handler that FastAPI's documentation tells to override does all of the work."""

    async def check(request: Request) -> None:
        if "x-refuse" in request.headers:
            raise BadRequest("no")

    async def double(body: int, request: Request) -> Response:
        return Response(f"{request.url.path} {2 * body}")

    endpoint = Endpoint("/double", double, methods=["POST"], dependencies=[Depends(check)])
    app = FastAPI()
    app.state.frontend = frontend = FakeFrontend()
    app.state.config = frontend.config
    app.add_route("/double", endpoint.get_route_handler(), methods=["POST"])
    async with make_client(app) as client:
        assert (await client.post("/double", content=b"21")).text == "/double 42"
        with pytest.raises(BadRequest, match="no"):
            await client.post("/double", content=b"21", headers={"x-refuse": "1"})
        with pytest.raises(BadRequest, match="give a whole number"):
            await client.post("/double", content=b'"x"')


def test_what_an_endpoint_may_take() -> None:
    async def other(body: int, depth: int) -> Response:
        return Response(f"{body} {depth}")

    with pytest.raises(TypeError, match="'depth'"):
        Endpoint("/other", other, methods=["POST"])
    Endpoint("/other/{depth}", other, methods=["POST"])


async def test_the_table_finds_plain_paths_and_leaves_others_to_the_router() -> None:
    def show(text: str) -> Callable[[], Any]:
        async def respond() -> Response:
            return Response(text)

        return respond

    router, later = APIRouter(route_class=Endpoint), APIRouter(route_class=Endpoint)
    router.add_api_route("/show", show("first"))
    later.add_api_route("/show", show("later"))
    app = FastAPI()
    app.add_middleware(PathTable, routers=[router, later])
    app.include_router(router)
    app.state.frontend = frontend = FakeFrontend()
    app.state.config = frontend.config
    async with make_client(app) as client:
        assert (await client.get("/show")).text == "later"
        assert [(await client.post(path)).status_code for path in ("/show", "/other")] == [405, 404]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_is_answered_once_and_logged(
    frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(frontend, "generate", broken)
    body = {"prompt": "hi", "stream": stream}
    app = make_app(frontend, enable_request_id_headers=True)
    async with make_client(app) as client:
        answer = await client.post(COMPLETIONS, json=body)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "Internal server error"
    assert "secret" not in answer.text
    assert "x-request-id" in answer.headers
    assert "secret" in caplog.text


async def test_a_bug_before_the_first_event_of_a_stream(
    frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer passes our middleware like any other, so it has a request id."""

    async def broken(*_: object, **__: object) -> AsyncGenerator[object]:
        raise RuntimeError("/secret/path")
        yield

    monkeypatch.setattr(frontend, "generate", broken)
    async with make_client(make_app(frontend, enable_request_id_headers=True)) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": "hi", "stream": True})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "Internal server error"
    assert "x-request-id" in answer.headers
    assert "/secret/path" in caplog.text


async def test_a_bug_after_the_answer_has_begun(frontend: FakeFrontend) -> None:
    """No second head is sent: it would break the connection for its reader."""
    app, sent = make_app(frontend), []

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if message["type"] == "http.response.body":
            raise RuntimeError("a bug of the connection")

    async def receive() -> Any:
        return {"type": "http.request", "body": b'{"prompt": "hi"}', "more_body": False}

    with pytest.raises(RuntimeError, match="of the connection"):
        await app(post_scope(COMPLETIONS), receive, send)
    assert sent == ["http.response.start", "http.response.body"]


async def test_a_function_that_asks_the_model_ends_when_its_client_leaves(frontend: FakeFrontend) -> None:
    ended: list[bool] = []

    async def count(body: TokenizeRequest) -> Response:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        raise AssertionError

    router = APIRouter(route_class=Endpoint)
    router.add_api_route("/tokenize", count, methods=["POST"])
    app = FastAPI()
    app.add_middleware(PathTable, routers=[router])
    app.state.frontend, app.state.config = frontend, frontend.config
    messages: list[Any] = [{"type": "http.disconnect"}, {"type": "http.request", "body": b'{"prompt": "a"}'}]

    async def receive() -> Any:
        return messages.pop()

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await app(post_scope("/tokenize"), receive, send)
    assert (ended, sent[0]["status"]) == ([True], CLIENT_GONE)


async def test_a_client_that_leaves_while_it_speaks(frontend: FakeFrontend) -> None:
    """The request is counted, though nobody reads its answer."""
    messages: list[Any] = [
        {"type": "http.request", "body": b'{"prompt"', "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    await make_app(frontend)(post_scope(COMPLETIONS), receive, send)
    assert sent[0]["status"] == CLIENT_GONE
    assert frontend.most_running == 0


async def test_under_a_path_that_a_proxy_has_put_before(frontend: FakeFrontend) -> None:
    async with make_client(make_app(frontend), root_path="/under") as client:
        assert (await client.post("/under" + COMPLETIONS, json={"prompt": "hi"})).status_code == 200


async def test_a_connection_that_stays_open_keeps_nothing_of_its_last_request(frontend: FakeFrontend) -> None:
    scope = post_scope(COMPLETIONS)
    body = {"type": "http.request", "body": b'{"prompt": "a", "max_tokens": 1}', "more_body": False}
    sent: list[Any] = []

    async def receive() -> Any:
        return body

    async def send(message: Any) -> None:
        sent.append(message)

    await make_app(frontend)(scope, receive, send)
    assert sent[0]["status"] == 200 and KEY not in scope
