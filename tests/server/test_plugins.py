"""Code of the operator's own in an API process, and routes for developers."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_api import make_app, make_client, post, post_stream
from fake_frontend import FakeFrontend
from live import refusal

from server.frontend.frontend import Frontend
from server.options.plugin_options import PluginOptions
from server.output_parsing import parser_plugins
from server.output_parsing.tool_call_dialects import DIALECTS_BY_NAME, THINKING_BY_NAME
from server.run.app import create_app

GetReady = Callable[..., Awaitable[Frontend]]

PARSERS = """
from facet import Dialect, JsonObject, ThinkingMarkers, register_reasoning_parser, register_tool_parser

register_tool_parser(Dialect("ours", ("<<call>>",), JsonObject(closes=("<</call>>",))))
register_reasoning_parser(ThinkingMarkers("ours", ("<<think>>",), ("<</think>>",)))
"""
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}},
}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}


@pytest.fixture
def frontend() -> FakeFrontend:
    return FakeFrontend()


@pytest.fixture
def parsers(tmp_path: Path) -> Iterator[Path]:
    """A file that registers parsers, which are forgotten after the test."""
    file = tmp_path / "parsers.py"
    file.write_text(PARSERS)
    known = [(table, dict(table)) for table in (DIALECTS_BY_NAME, THINKING_BY_NAME)]
    yield file
    for table, before in known:
        table.clear()
        table.update(before)  # pyright: ignore[reportArgumentType]


def plugged(frontend: FakeFrontend, **plugins: Any) -> httpx.AsyncClient:
    return make_client(make_app(frontend, plugins=PluginOptions(**plugins)), raise_app_exceptions=False)


@pytest.mark.parametrize("order", [1, -1])
async def test_middleware_passes_whole_answers_and_streams(frontend: FakeFrontend, order: int) -> None:
    names = ["operator_plugins.NamingMiddleware", "operator_plugins:judging"][::order]
    frontend.reply = "hello"
    async with plugged(frontend, middleware=names) as client:
        response = await client.get("/live")
        assert (response.headers["x-operator"], response.headers["x-function"]) == ("class", "passed")
        chunks = await post_stream(client, "/v1/completions", prompt="x", max_tokens=5)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello"
        assert (await client.get("/nowhere")).headers["x-function"] == "passed"


async def test_middleware_that_breaks_harms_its_own_request(frontend: FakeFrontend) -> None:
    async with plugged(frontend, middleware=["operator_plugins.judging"]) as client:
        broken = await client.get("/live", headers={"x-break": "1"})
        assert (broken.status_code, broken.json()["error"]["code"]) == (500, 500)
        assert (await client.get("/live")).status_code == 200


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("operator_plugins.NOTHING", "it is neither a class nor an async function"),
        ("operator_plugins.no_such", "cannot be imported: AttributeError"),
        ("no_such.Class", "cannot be imported: ModuleNotFoundError: No module named 'no_such'"),
        ("nothing", "write it as module:Name"),
    ],
)
async def test_middleware_that_cannot_be_used(ready: GetReady, name: str, said: str) -> None:
    with pytest.raises(ValueError, match="--middleware") as refused:
        create_app(await ready("--middleware", name))
    assert said in str(refused.value)


async def test_flags_of_lists_of_plugins_add_up(ready: GetReady) -> None:
    frontend = await ready("--middleware", "a.B", "--middleware", "c.D", "e.F", "--logits-processors", "g:H")
    assert frontend.config.plugins.middleware == ["a.B", "c.D", "e.F"]
    assert frontend.config.engine.worker.logits_processors == ["g:H"]


async def test_parsers_of_a_file_read_calls_and_reasoning(frontend: FakeFrontend, parsers: Path) -> None:
    parser_plugins.load_parsers({"--tool-parser-plugin": str(parsers)})
    frontend.reply = '<<think>>Hm.<</think>>I call. <<call>>{"name": "f", "arguments": {"a": 1}}<</call>>'
    async with make_client(make_app(frontend, tool_call_parser="ours", reasoning_parser="ours")) as client:
        [choice] = (await post(client, "/v1/chat/completions", **CHAT))["choices"]
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "I call.")
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "FileNotFoundError"),
        ("import no_such", "ModuleNotFoundError: No module named 'no_such'"),
        (PARSERS.replace('"ours"', '"hermes"'), "ValueError: there is a tool parser named 'hermes' already"),
        (PARSERS.replace("Dialect(", "int("), "TypeError"),
    ],
)
def test_a_file_of_parsers_that_cannot_be_used(parsers: Path, content: str | None, said: str) -> None:
    parsers.unlink()
    if content is not None:
        parsers.write_text(content)
    with pytest.raises(ValueError, match=r"--reasoning-parser-plugin .*parsers\.py cannot") as refused:
        parser_plugins.load_parsers({"--reasoning-parser-plugin": str(parsers)})
    assert said in str(refused.value)


async def test_routes_for_developers_are_there_only_if_asked_for(ready: GetReady) -> None:
    async def call(path: str, *flags: str, body: object = None) -> tuple[int, Any]:
        transport = httpx.ASGITransport(create_app(await ready(*flags)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            response = await client.post(
                path, content=json.dumps(body), headers={"content-type": "application/json"}
            )
            return response.status_code, response.json()

    for path in ("/collective_rpc", "/start_profile", "/stop_profile"):
        assert (await call(path, body={"method": "a"}))[0] == 404
    body = {"method": "a", "args": [1], "kwargs": {"b": 2}, "timeout": 60}
    assert await call("/collective_rpc", "--server-dev-mode", body=body) == (
        200,
        {"results": [["a", [1], {"b": 2}]]},
    )
    status, answer = await call("/collective_rpc", "--server-dev-mode", body={"method": "fail"})
    assert (status, answer["error"]["message"]) == (400, "fail failed: no such thing")
    status, answer = await call("/collective_rpc", "--server-dev-mode", body={"method": "\ud83d"})
    assert (status, "surrogate" in answer["error"]["message"]) == (400, True)
    profiler = ("--profiler-config", '{"profiler": "torch", "torch_profiler_dir": "x"}')
    started = (200, {"results": [["profile", [True, "p"], {}]]})
    assert await call("/start_profile?profile_prefix=p", *profiler) == started
    assert (await call("/start_profile?max_iterations=3", *profiler))[0] == 400
    assert await call("/stop_profile", *profiler) == (200, {"results": [["profile", [False], {}]]})


def test_a_parser_is_named_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "parsers.py"
    file.write_text("import vllm")
    assert "--tool-parser-plugin" in refusal("demo", "--tool-parser-plugin", str(file))
