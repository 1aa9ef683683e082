"""Start, stop and death of the real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import httpx
import pytest
from live import COMMAND, LiveServer, alive, events, serving, wait_until

from engine_core.protocol import PHASES

SMALL = ("--kv-cache-memory-bytes", "64M")
LONG = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}


@pytest.fixture
def server():
    with serving("demo", *SMALL) as server:
        yield server


def test_http_is_there_before_the_model():
    server = LiveServer("demo", *SMALL)
    try:
        wait_until(lambda: reachable(server), 30)
        assert server.get("/live").status_code == 200
        health = server.get("/health")
        if health.status_code != 200:  # a fast machine may be ready already
            assert health.status_code == 503
            body = health.json()
            assert body["state"] == "loading" and body["stage"] and 0 <= body["progress"] <= 1
            refused = server.post("/v1/completions", {"prompt": "x"})
            assert refused.status_code in (200, 503)
            if refused.status_code == 503:
                assert refused.headers["retry-after"] and refused.json()["error"]["type"]
        server.wait_ready()
        assert server.get("/ready").status_code == 200
    finally:
        server.close()


def test_the_api_process_never_loads_torch(demo: LiveServer):
    assert demo.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
    [api] = demo.api_pids()
    assert "libtorch" not in Path(f"/proc/{api}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{demo.engine_pid()}/maps").read_text()


def test_only_the_http_port_listens(demo: LiveServer):
    assert demo.listening() == {("127.0.0.1", demo.port)}


def test_sigterm_lets_a_stream_finish(server: LiveServer):
    with server.stream("/v1/completions", LONG) as response:
        data = events(response)
        next(data)
        server.process.send_signal(signal.SIGTERM)
        rest = list(data)
    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(60) == 0


@pytest.mark.parametrize(("api_servers", "killed_when"), [(1, "loading libraries"), (2, "starting")])
def test_death_of_the_engine_while_it_loads_is_explained(api_servers: int, killed_when: str):
    """There is nobody to wait for yet, and memory that is short will be short again."""
    server = LiveServer("demo", *SMALL, "--api-server-count", str(api_servers))
    try:
        if killed_when == "loading libraries":
            wait_until(lambda: "Loading libraries" in server.output(), 20, server.output)
        else:
            wait_until(lambda: bool(server.engine_pids()), 20, server.output)
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert server.process.wait(60) == 2
        errors = [line for line in server.output().splitlines() if line.startswith("error: ")]
        killed = "it was ended by SIGKILL, most likely because memory ran out"
        # On a busy machine it may have gone on to a later phase before it was killed.
        phases = list(PHASES.values())
        later = "|".join(phases[phases.index(killed_when) :])
        told = f"error: the engine process ended while ({later}): {killed}"
        assert len(errors) == 1 and re.match(told, errors[0]), server.output()
    finally:
        server.close()


def test_ctrl_c_while_the_model_loads_waits_for_no_process():
    """There are no requests to finish yet, so a process that cannot hear the signal is not waited for."""
    server = LiveServer("demo", *SMALL, "--shutdown-timeout", "300")
    try:
        wait_until(lambda: "Loading libraries" in server.output(), 20, server.output)
        children = server.children()
        os.kill(server.api_pids()[0], signal.SIGSTOP)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0, server.output()
        assert "ERROR" not in server.output()
        wait_until(lambda: not any(map(alive, children)), 10, "a child outlived the server")
    finally:
        server.close()


def test_no_child_survives_the_parent():
    with serving("demo", *SMALL) as server:
        children = server.children()
        assert children
        os.kill(server.process.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(alive, children)), 2, "a child outlived its parent by two seconds")


def test_a_client_that_leaves_frees_its_place(server: LiveServer):
    longer = {**LONG, "max_tokens": 2000}  # than it takes the gauges to be told
    with server.stream("/v1/completions", longer) as response:
        data = events(response)  # held: an iterator that is dropped closes the response
        next(data)
        wait_until(lambda: gauge(server, "vllm:num_requests_running") == 1, 5)
    wait_until(lambda: gauge(server, "vllm:num_requests_running") == 0, 5)
    wait_until(lambda: gauge(server, "vllm:kv_cache_usage_perc") == 0, 5)


def test_two_api_servers_share_one_engine():
    ask = {"prompt": "The capital of France is", "temperature": 0}
    with serving("demo", *SMALL, "--api-server-count", "2") as server:
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.children()]
        assert sum(b"engine_core.process" in command for command in commands) == 1
        answers = {server.post("/v1/completions", ask).json()["choices"][0]["text"] for _ in range(8)}
        assert len(answers) == 1
        assert server.terminate() == 0


def test_port_in_use_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [*COMMAND, "demo", "--port", port]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 98
    assert len(refused.stderr.strip().splitlines()) == 1 and port in refused.stderr


def test_a_bad_model_is_one_clear_line(tmp_path: Path):
    (tmp_path / "config.json").write_text("{not json")
    server = LiveServer(str(tmp_path))
    try:
        assert server.process.wait(60) == 2
        last = server.output().strip().splitlines()[-1]
        assert last.startswith("error: ") and "config.json" in last
    finally:
        server.close()


def reachable(server: LiveServer) -> bool:
    try:
        return server.get("/live").status_code == 200
    except httpx.TransportError:
        return False


def gauge(server: LiveServer, name: str) -> float:
    for line in server.get("/metrics").text.splitlines():
        if line.startswith((name + "{", name + " ")):
            return float(line.rsplit(" ", 1)[1])
    raise KeyError(name)
