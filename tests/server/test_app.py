"""The application: what every request passes before its route, and the shape of errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import product

import httpx
import pytest
from fake_client import FakeClient

from server.errors import BadRequest, status_at
from server.frontend.frontend import Frontend
from server.http.connection import body_limits
from server.http.endpoint import Endpoint
from server.page import api_page
from server.routes import admin
from server.run.app import ROUTERS, create_app

Make = Callable[..., Frontend]
GetReady = Callable[..., Awaitable[Frontend]]


def connect(frontend: Frontend) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(frontend), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


def error_of(response: httpx.Response) -> dict[str, object]:
    error = response.json()["error"]
    if response.request.url.path.startswith("/v1/messages"):
        assert set(error) == {"message", "type"} and response.json()["type"] == "error"
        return error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == response.status_code
    return error


async def test_health_through_a_life(client: FakeClient, ready: GetReady, make: Make) -> None:
    async with connect(make()) as http:
        for path in ("/health", "/ready", "/ping"):
            response = await http.get(path)
            assert response.status_code == 503
            assert response.json() | {"elapsed_s": 0} == {
                "state": "loading",
                "reason": "loading",
                "stage": "start",
                "progress": 0.0,
                "elapsed_s": 0,
            }
        assert (await http.get("/live")).status_code == 200
    frontend = await ready()
    async with connect(frontend) as http:
        for path in ("/health", "/ready", "/ping", "/live", "/version", "/load", "/metrics"):
            assert (await http.get(path)).status_code == 200, path
        for path in ("/health", "/ready", "/live", "/api/tags", "/api/version"):  # as wget --spider does
            assert (await http.head(path)).status_code == 200, path
        assert (await http.post("/ping")).status_code == 200
        frontend.begin_drain(refuse=True)
        response = await http.get("/ready")
        draining = {"state": "draining", "reason": "draining"}
        assert (response.status_code, response.json()) == (503, draining)
        refused = await http.post("/v1/completions", json={"prompt": "x"})
        assert error_of(refused)["type"] == "draining"
        assert refused.headers["connection"] == "close"
        assert "retry-after" in refused.headers
        client.fail("it broke")
        response = await http.get("/health")
        assert (response.status_code, response.json()) == (
            503,
            {"state": "dead", "reason": "engine_given_up"},
        )
        assert (await http.get("/live")).status_code == 200
        error = error_of(await http.post("/v1/completions", json={"prompt": "x"}))
        assert error["type"] == "engine_given_up" and "it broke" not in str(error["message"])


async def test_requests_wait_for_an_engine_that_is_started_again(client: FakeClient, ready: GetReady) -> None:
    frontend = await ready()
    async with connect(frontend) as http:
        client.restart("engine_killed")
        response = await http.get("/ready")
        assert response.status_code == 503 and response.headers["retry-after"]
        assert response.json() | {"elapsed_s": 0} == {
            "state": "restarting",
            "reason": "engine_killed",
            "elapsed_s": 0,
        }
        asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
        while not client.submitted:
            await asyncio.sleep(0)
        client.become_ready()
        client.submitted[0].say([9], finish="length")
        assert (await asking).status_code == 200
        assert (await http.get("/ready")).status_code == 200


async def test_an_engine_that_makes_no_progress_is_told(client: FakeClient, ready: GetReady) -> None:
    frontend = await ready()
    client.restarting = "engine_stalled"
    async with connect(frontend) as http:
        response = await http.get("/health")
        assert response.status_code == 503 and response.headers["retry-after"]
        assert response.json() == {"state": "stalled", "reason": "engine_stalled"}
        asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
        while not client.submitted:
            await asyncio.sleep(0)
        client.submitted[0].say([9], finish="length")
        assert (await asking).status_code == 200, "it was let in, to wait"


async def test_a_deep_check_computes_a_token(
    client: FakeClient, ready: GetReady, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend = await ready("--api-key", "key")
    async with connect(frontend) as http:
        assert (await http.get("/health?deep=0")).status_code == 401
        assert (await http.get("/ready?%64eep=1")).status_code == 401
        assert (await http.get("/ready?other=1")).status_code == 200 and not client.submitted
        http.headers["Authorization"] = "Bearer key"
        asking = asyncio.create_task(http.get("/health?deep=1"))
        while not client.submitted:
            await asyncio.sleep(0)
        assert client.submitted[0].params.max_tokens == 1
        client.submitted[0].say([9], finish="length")
        answer = await asking
        assert answer.status_code == 200 and answer.json()["state"] == "ready"
        monkeypatch.setattr(admin, "DEEP_SECONDS", 0.01)
        late = await http.get("/health?deep=1")
        assert late.status_code == 503 and late.headers["retry-after"]
        assert late.json() == {"state": "slow", "reason": "too_slow", "elapsed_s": 0.01}
        assert client.aborted and frontend.live == 0


async def test_load_balancers_learn_of_the_end_before_anybody_is_refused(
    client: FakeClient, ready: GetReady
) -> None:
    frontend = await ready()
    async with connect(frontend) as http:
        frontend.begin_drain(refuse=False)
        assert (await http.get("/ready")).status_code == 503
        asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
        while not client.submitted:
            await asyncio.sleep(0)
        client.submitted[0].say([9], finish="length")
        assert (await asking).status_code == 200


async def test_keys_guard_all_but_the_signs_of_life(ready: GetReady) -> None:
    frontend = await ready("--api-key", "first", "sécond", "--root-path", "/under")
    async with connect(frontend) as http:
        for path in ("/live", "/health", "/ready", "/ping"):
            assert (await http.get(path)).status_code == 200, path
        for path in (
            "/v1/models",
            "/metrics",
            "/version",
            "/openapi.json",
            "/nothing",
            "//v1/models",
            "/live/",
            "/LIVE",
        ):
            response = await http.get(path)
            assert response.status_code == 401, path
            assert error_of(response)["type"] == "AuthenticationError"
            assert response.headers["www-authenticate"] == "Bearer"
        assert (await http.options("/v1/models")).status_code == 401
        for bad in ("Bearer wrong", "Bearer ", "Basic first", "first", "Bearer first second", "Bearer \xff"):
            headers = [(b"authorization", bad.encode("latin-1"))]
            assert (await http.get("/v1/models", headers=headers)).status_code == 401, bad
        for key in ("first", "sécond"):
            headers = [(b"authorization", f"Bearer {key}".encode())]
            assert (await http.get("/v1/models", headers=headers)).status_code == 200, key


async def test_there_is_no_documentation_if_it_is_switched_off(
    ready: GetReady, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_page, "_describe", lambda app: b"{}")
    async with connect(await ready()) as http:
        for path in ("/docs", "/openapi.json"):
            assert (await http.get(path)).status_code == 200
    async with connect(await ready("--disable-fastapi-docs")) as http:
        for path in ("/docs", "/openapi.json"):
            answer = await http.get(path)
            why = f"{path} is not served: --disable-fastapi-docs has turned it off."
            assert (answer.status_code, error_of(answer)["message"]) == (404, why)


async def test_errors_of_the_framework_have_our_shape(ready: GetReady) -> None:
    async with connect(await ready()) as http:
        error = error_of(await http.get("/nothing"))
        assert (error["type"], error["code"]) == ("NotFoundError", 404)
        assert error["message"] == "There is no /nothing here; GET /docs lists what there is."
        response = await http.put("/v1/completions")
        assert response.status_code == 405
        assert response.headers["allow"] == "POST"
        assert "use POST" in str(error_of(response)["message"])
        response = await http.post("/abort", content=b'{"a":', headers={"content-type": "application/json"})
        assert error_of(response)["param"] == "body.5"
        error = error_of(await http.post("/abort", json={}))
        assert error["param"] == "body.request_ids"


async def test_errors_of_a_path_that_apis_share_have_the_shape_of_the_dialect(ready: GetReady) -> None:
    async with connect(await ready()) as http:
        for dialect, status in (("tei", 413), ("llama.cpp", 400), ("voyage", 400)):
            answer = await http.post("/tokenize", json={}, headers={"x-facet-dialect": dialect})
            assert answer.status_code == status, dialect
            kinds = {"tei": {"error", "error_type"}, "llama.cpp": {"code", "message", "type"}}
            found = answer.json() if dialect == "tei" else answer.json()["error"]
            assert set(found) == kinds.get(dialect, {"message", "type", "param", "code"})


async def test_bodies_are_bounded_while_they_are_read(
    ready: GetReady, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_limits, "MAX_BODY", 1000)
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield b" " * 100

    json = {"content-type": "application/json"}
    async with connect(await ready()) as http:
        response = await http.post("/abort", content=b" " * 1001, headers=json)
        assert (response.status_code, response.headers["connection"]) == (413, "close")
        assert error_of(response)["type"] == "RequestTooLargeError"
        response = await http.post("/abort", content=endless(), headers=json)
        assert response.status_code == 413
        assert taken < 20
        response = await http.post("/abort", json={"request_ids": []})
        assert response.json() == {"aborted": 0}
        response = await http.post("/abort", content=b"x", headers={**json, "content-encoding": "gzip"})
        assert response.status_code == 415


async def test_long_bodies_share_memory(ready: GetReady, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long one that finds no room is refused, before it is read if it has told its length."""
    monkeypatch.setattr(body_limits, "MAX_TOGETHER", 3000)
    monkeypatch.setattr(body_limits, "ALWAYS_READ", 1000)
    memory, read = body_limits.BODY_MEMORY, asyncio.Event()
    go_on = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"request_ids":' + b" " * 985
        yield b" " * 1000
        read.set()
        await go_on.wait()
        yield b"[]}"

    json = {"content-type": "application/json"}
    async with connect(await ready()) as http:
        first = asyncio.create_task(http.post("/abort", content=pieces(), headers=json))
        await read.wait()
        await asyncio.sleep(0)
        assert memory.taken == 2000
        response = await http.post("/abort", content=b" " * 1001, headers=json)
        assert response.headers["retry-after"] == "1"
        assert (response.headers["connection"], error_of(response)["code"]) == ("close", 503)
        response = await http.post("/abort", content=pieces(), headers=json)
        assert error_of(response)["type"] == "ServiceUnavailableError"
        response = await http.post("/abort", content=b'{"request_ids":[]}', headers=json)
        assert response.json() == {"aborted": 0}
        go_on.set()
        assert (await first).json() == {"aborted": 0}
        assert memory.taken == 0
        assert (await http.post("/abort", content=pieces(), headers=json)).json() == {"aborted": 0}


async def test_a_host_is_well_formed(ready: GetReady) -> None:
    async with connect(await ready("--allowed-hosts", "*")) as http:
        for host in ("", "a/b", "a@b", "a?b#c"):
            response = await http.get("/live", headers={"host": host})
            assert (response.status_code, response.headers["connection"]) == (400, "close"), host
        assert (await http.get("/live", headers={"host": "anything"})).status_code == 200


async def test_foreign_hosts_and_web_pages_are_refused_on_every_path(ready: GetReady) -> None:
    async with connect(await ready("--allowed-origins", "https://site")) as http:
        for path in ("/live", "/v1/models", "/metrics", "/docs", "/nothing"):
            response = await http.get(path, headers={"host": "evil.example"})
            assert error_of(response)["type"] == "MisdirectedRequestError"
            response = await http.get(path, headers={"origin": "https://evil.example"})
            assert (error_of(response)["code"], response.headers["connection"]) == (403, "close")
            response = await http.get(path, headers={"origin": "http://localhost"})
            assert response.status_code != 403
        response = await http.get("/live", headers={"origin": "https://site"})
        assert response.headers["access-control-allow-origin"] == "https://site"


WITHOUT_BODY = {
    "/ping",
    "/v1/responses/compact",
    "/sleep",
    "/wake_up",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/flush_cache",
}
FORMS = {"/v1/audio/transcriptions", "/v1/audio/translations", "/v1/files"}
"""Paths that take forms, as OpenAI's clients send files."""
BODY_PATHS = sorted(
    route.path
    for router in ROUTERS
    for route in router.routes
    if isinstance(route, Endpoint)
    and "POST" in route.methods
    and route.path not in WITHOUT_BODY | FORMS
    and "{" not in route.path
)


async def test_bodies_are_json_by_name(ready: GetReady) -> None:
    """A web page can send any other type to any server, without asking."""
    kinds = ("text/plain", "multipart/form-data", "application/x-www-form-urlencoded", "application/xml", "")
    async with connect(await ready()) as http:
        for path, headers in product(BODY_PATHS, ({}, *({"content-type": kind} for kind in kinds))):
            response = await http.post(path, content=b"{}", headers=headers)
            assert "Unsupported Media Type: Only 'application/json' is allowed" in response.text, path
            assert response.status_code == status_at(BadRequest(""), path), (path, headers)


async def test_request_ids_come_back_only_if_well_formed_and_wanted(ready: GetReady) -> None:
    async with connect(await ready()) as http:
        assert "x-request-id" not in (await http.get("/live", headers={"x-request-id": "a"})).headers
    async with connect(await ready("--enable-request-id-headers")) as http:
        assert (await http.get("/live", headers={"x-request-id": "a.b:c-1"})).headers[
            "x-request-id"
        ] == "a.b:c-1"
        for bad in ("../../x", "a" * 129, ""):
            made = (await http.get("/live", headers={"x-request-id": bad})).headers["x-request-id"]
            assert made != bad
            assert len(made) == 32


async def test_browsers_are_told_which_origins_may_call(ready: GetReady) -> None:
    asked = {"origin": "http://site", "access-control-request-method": "POST"}
    async with connect(await ready()) as http:
        assert "access-control-allow-origin" not in (await http.options("/live", headers=asked)).headers
    async with connect(await ready("--allowed-origins", "http://site", "--api-key", "k")) as http:
        response = await http.options("/v1/completions", headers=asked)
        assert response.headers["access-control-allow-origin"] == "http://site"
        other = {**asked, "origin": "http://other"}
        assert "access-control-allow-origin" not in (await http.options("/live", headers=other)).headers


async def test_http_requests_are_counted_by_route_not_by_path(ready: GetReady) -> None:
    frontend = await ready()
    async with connect(frontend) as http:
        await http.get("/live")
        await http.get("/made/up/path")
        page = (await http.get("/metrics")).text
    assert 'http_requests_total{handler="/live",method="GET",status="2xx"} 1.0' in page
    assert 'http_requests_total{handler="none",method="GET",status="4xx"} 1.0' in page
    assert "made" not in page
