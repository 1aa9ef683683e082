"""Start, stop and death of the real processes."""

import os
import re
import signal
from pathlib import Path
from textwrap import dedent

import httpx
import pytest
from live import LONG, SMALL, LiveServer, alive, events, serving, starting, wait_until


@pytest.mark.slow(2)
def test_http_is_there_before_the_model():
    with starting("demo", *SMALL) as server:
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


def test_the_api_process_never_loads_torch(demo: LiveServer):
    assert demo.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
    [api] = demo.api_pids()
    assert "libtorch" not in Path(f"/proc/{api}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{demo.engine_pid()}/maps").read_text()


def test_only_the_http_port_listens(demo: LiveServer):
    assert demo.listening() == {("127.0.0.1", demo.port)}


@pytest.mark.turns(7)
@pytest.mark.parametrize(("api_servers", "killed_when"), [(1, "loading libraries"), (2, "starting")])
def test_death_of_the_engine_while_it_loads_is_explained(
    api_servers: int, killed_when: str, loading_slowly: dict[str, str]
):
    """There is nobody to wait for yet, and memory that is short will be short again."""
    with starting("demo", *SMALL, "--api-server-count", str(api_servers), env=loading_slowly) as server:
        if killed_when == "loading libraries":
            wait_until(lambda: "Loading libraries" in server.output(), 20, server.output)
        else:
            wait_until(lambda: bool(server.engine_pids()), 20, server.output)
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert server.process.wait(60) == 2
        errors = [line for line in server.output().splitlines() if line.startswith("error: ")]
        killed = "it was ended by SIGKILL, most likely because memory ran out"
        # On a busy machine it may have begun to load libraries before it was killed.
        told = f"error: the engine process ended while ({killed_when}|loading libraries): {killed}"
        assert len(errors) == 1 and re.match(told, errors[0]), server.output()


@pytest.fixture
def loading_slowly(tmp_path: Path) -> dict[str, str]:
    """An environment in which no engine is ready before a test has ended it, however busy the machine."""
    (tmp_path / "sitecustomize.py").write_text(
        dedent("""
        import sys, time

        class Slow:
            def find_spec(self, name, *_):
                if name == "torch":
                    time.sleep(300)

        sys.meta_path.insert(0, Slow())
        """)
    )
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.slow
def test_ctrl_c_while_the_model_loads_waits_for_no_process(loading_slowly: dict[str, str]):
    """There are no requests to finish yet, so a process that cannot hear the signal is not waited for."""
    with starting("demo", *SMALL, "--shutdown-timeout", "300", env=loading_slowly) as server:
        wait_until(lambda: "Loading libraries" in server.output(), 20, server.output)
        children = server.children()
        os.kill(server.api_pids()[0], signal.SIGSTOP)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0, server.output()
        assert "ERROR" not in server.output()
        wait_until(lambda: not any(map(alive, children)), 10, "a child outlived the server")


@pytest.mark.slow
def test_a_killed_server_leaves_no_child_and_its_folder_to_the_next_start(short_path: Path):
    place = {"TMPDIR": str(short_path)}
    with serving("demo", *SMALL, env=place) as server:
        children = server.children()
        assert children
        os.kill(server.process.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(alive, children)), 2, "a child outlived its parent by two seconds")
    [left] = short_path.glob("facet-*")
    with serving("demo", *SMALL, env=place) as server:
        assert not left.exists() and len(list(short_path.glob("facet-*"))) == 1
        assert server.terminate() == 0
    assert list(short_path.glob("facet-*")) == []


def test_a_client_that_leaves_frees_its_place(demo: LiveServer):
    longer = {**LONG, "max_tokens": 2000}  # than it takes the gauges to be told
    with demo.stream("/v1/completions", longer) as response:
        data = events(response)  # held: an iterator that is dropped closes the response
        next(data)
        wait_until(lambda: demo.numbers("vllm:num_requests_running") == {"0": 1}, 5)
    wait_until(lambda: demo.numbers("vllm:num_requests_running") == {"0": 0}, 5)
    wait_until(lambda: demo.numbers("vllm:kv_cache_usage_perc") == {"0": 0}, 5)


def reachable(server: LiveServer) -> bool:
    try:
        return server.get("/live").status_code == 200
    except httpx.TransportError:
        return False
