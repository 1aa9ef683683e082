"""The page and its stream over a real server: there before the model, and no hindrance to the end."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
from live import LiveServer, wait_until

from server.terminal.connection import Server

SMALL = ("--dtype", "float32", "--kv-cache-memory-bytes", "64M")


def states(lines: Iterator[str]) -> Iterator[str]:
    return (json.loads(line[6:])["state"] for line in lines if line.startswith("data: {"))


def answers(server: LiveServer) -> bool:
    try:
        return server.get("/").status_code == 200
    except httpx.TransportError:
        return False


def test_the_stream_tells_of_loading_and_of_the_end() -> None:
    server = LiveServer("demo", *SMALL)
    try:
        wait_until(lambda: answers(server), 60, server.output)
        with httpx.stream("GET", f"{server.url}/live/events", timeout=60) as response:
            seen = states(response.iter_lines())
            while (state := next(seen)) != "ready":
                assert state == "loading"
            server.process.terminate()
            assert list(seen)[-1] in ("draining", "dead")  # by how far it has got within a second
        assert server.terminate() == 0
    finally:
        server.close()


def test_commands_work_beside_it(demo: LiveServer) -> None:
    with Server(demo.url) as server:
        events = server.stream(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True},
        )
        assert sum(bool(event["choices"]) for event in events) >= 1
        assert server.get("/v1/models")["data"][0]["id"] == "demo"


def test_a_stream_that_is_left_ends_at_the_server(demo: LiveServer) -> None:
    with Server(demo.url) as server:
        events = server.stream(
            "/v1/completions", {"prompt": "a", "max_tokens": 100, "stream": True, "ignore_eos": True}
        )
        next(events)
        events.close()
        wait_until(lambda: demo.get("/load").json() == {"server_load": 0}, 60, lambda: "it goes on")
        assert server.get("/v1/models")["data"]  # over another connection
