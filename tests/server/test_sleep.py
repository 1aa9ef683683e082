"""The routes by which administrators pause a model, put it to sleep, wake it, and empty caches."""

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import patch

import httpx
import pytest
from fake_client import FakeClient

from engine_core.client.operator_commands import WeightsTaken
from engine_core.protocol import PauseAll, ResetPrefixCache, ResumeAll, Sleep
from server.frontend.frontend import Frontend
from server.options.option_parsing import OptionError
from server.options.parse_server_options import parse
from server.run.app import create_app

GetReady = Callable[..., Awaitable[Frontend]]
SLEEPS = "--enable-sleep-mode"


def connect(frontend: Frontend, key: str = "") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(frontend), raise_app_exceptions=False)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)


async def test_a_model_sleeps_and_wakes(client: FakeClient, ready: GetReady) -> None:
    async with connect(await ready(SLEEPS)) as http:
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": False}
        for query, order in (
            ("", Sleep(1)),
            ("?level=2&mode=abort", Sleep(2, True)),
            ("?mode=wait", Sleep(1)),
        ):
            answer = await http.post(f"/sleep{query}")
            assert (answer.status_code, answer.json()) == (200, {"is_sleeping": True})
            assert client.told[-1] == order
        health, readiness = await http.get("/health"), await http.get("/ready")
        assert (health.status_code, readiness.status_code) == (200, 503)
        assert health.json() == readiness.json() == {"state": "asleep", "reason": "asleep"}
        refused = await http.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and refused.headers["retry-after"] == "10"
        assert (
            refused.json()["error"]["type"] == "asleep" and "/wake_up" in refused.json()["error"]["message"]
        )
        client.cannot_wake = "no memory in /secret/path"
        refused = await http.post("/wake_up")
        assert refused.status_code == 503 and "secret" not in refused.text
        client.cannot_wake = ""
        assert (await http.post("/wake_up?tags=weights&tags=kv_cache")).json() == {"is_sleeping": False}
        assert (await http.get("/ready")).status_code == 200


async def test_weights_while_another_process_loads_some_are_a_409(
    client: FakeClient, ready: GetReady
) -> None:
    async with connect(await ready("--server-dev-mode")) as http:
        with patch.object(
            client.orders, "update_weights", side_effect=WeightsTaken("those of /b are loaded")
        ):
            refused = await http.post("/update_weights", json={"path": "/a"})
    assert (
        refused.status_code == 409 and "/b are loaded. Order them again" in refused.json()["error"]["message"]
    )


async def test_a_model_is_paused_and_goes_on(client: FakeClient, ready: GetReady) -> None:
    async with connect(await ready("--server-dev-mode")) as http:
        for query, order in (
            ("", PauseAll("abort", True)),
            ("?mode=keep&clear_cache=false", PauseAll("keep", False)),
            ("?wait_for_inflight_requests=true", PauseAll("wait", True)),
        ):
            answer = await http.post(f"/pause{query}")
            assert (answer.status_code, answer.json()) == (200, {"status": "paused"})
            assert client.told[-1] == order
            assert (await http.get("/is_paused")).json() == {"is_paused": True}
        assert (await http.get("/health")).status_code == 200
        assert (await http.post("/resume")).json() == {"status": "resumed"} and client.told[-1] == ResumeAll()
        assert (await http.get("/is_paused")).json() == {"is_paused": False}
        wrong = await http.post("/pause?mode=stop")
        assert (
            wrong.status_code == 400 and "`mode` is abort, wait or keep" in wrong.json()["error"]["message"]
        )
    async with connect(await ready()) as http:
        absent = await http.post("/pause")
        assert absent.status_code == 404 and "--server-dev-mode" in absent.json()["error"]["message"]


async def test_wrong_orders_are_refused_in_a_sentence(client: FakeClient, ready: GetReady) -> None:
    async with connect(await ready(SLEEPS)) as http:
        for path, word in (
            ("/sleep?level=3", "`level` is 1"),
            ("/sleep?level=x", "got 'x'"),
            ("/sleep?mode=keep", "`mode` is wait or abort"),
            ("/wake_up?tags=weights", "wake together"),
        ):
            answer = await http.post(path)
            assert answer.status_code == 400 and word in answer.json()["error"]["message"], path
    async with connect(await ready()) as http:
        foreign = await http.post("/sleep", headers={"origin": "https://evil.example"})
        assert foreign.status_code == 403 and "origins" in foreign.json()["error"]["message"]
        answer = await http.post("/sleep")
        assert answer.status_code == 403 and SLEEPS in answer.json()["error"]["message"]
    assert client.told == []


async def test_caches_are_emptied(client: FakeClient, ready: GetReady) -> None:
    async with connect(await ready()) as http:
        for path in ("/reset_prefix_cache", "/reset_mm_cache"):
            assert (await http.post(path)).json() == {"success": True}
    assert client.told == [ResetPrefixCache()]


async def test_only_administrators_may(ready: GetReady, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("root", "alice")}
    rights = {"root": "admin = true", "alice": ""}
    entries = [f'[[keys]]\nname = "{name}"\nsha256 = "{digests[name]}"\n{rights[name]}\n' for name in digests]
    file.write_text("".join(entries))
    file.chmod(0o600)
    frontend = await ready(SLEEPS, "--server-dev-mode", "--api-key-file", str(file))
    paths = ("/pause", "/resume", "/reset_prefix_cache", "/reset_mm_cache", "/flush_cache")
    paths += ("/sleep", "/wake_up")
    async with connect(frontend, "alice") as http:
        assert (await http.get("/slots")).status_code == 403
        assert {(await http.post(path)).status_code for path in paths} == {403}
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": False}
    async with connect(frontend, "root") as http:
        assert {(await http.post(path)).status_code for path in paths} == {200}
        assert {slot["is_processing"] for slot in (await http.get("/slots")).json()} == {False}
    async with connect(frontend) as http:
        assert (await http.post("/sleep")).status_code == 401


def test_replicas_that_cannot_sleep_are_refused_at_start() -> None:
    for flags in (("--enable-expert-parallel", "-dp", "2"), ("--nnodes", "2", "--cluster-key", "x" * 20)):
        with pytest.raises(OptionError, match=SLEEPS):
            parse(["demo", SLEEPS, *flags], {})
