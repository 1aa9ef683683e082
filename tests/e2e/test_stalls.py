"""Real processes are stopped, as if they hung, under a real server, which says so and replaces them."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from holdups import holdups
from live import COMMAND, LONG, SMALL, alive, complete, events, serving, wait_until
from probes import probing

SECONDS = 60
"""Seconds within which something happens that takes a few on a machine with nothing else to do."""

SHORTENED = "import engine_core.stalls as rules; rules.STALL_SECONDS, rules.KILL_SECONDS = {}, {}; "


def hurried(stall: float = 1.5, kill: float = 4.0) -> list[str]:
    """The command, but with other limits: the supervisor alone reads them."""
    return [*COMMAND[:-1], SHORTENED.format(stall, kill) + COMMAND[-1]]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that is stopped, and if it lives in the end goes on."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGCONT)


def test_an_engine_that_hangs_is_replaced_and_its_streams_go_on() -> None:
    with serving("demo", *SMALL, command=hurried()) as server:
        expected = complete(server)
        with server.stream("/v1/completions", LONG, SECONDS) as response:
            data = events(response)
            next(data)
            engine = server.engine_pid()
            with stopped(engine), probing(server.port, "/live", "/ready", "/health") as probes:
                wait_until(lambda: server.get("/ready").status_code == 503, SECONDS)
                answer = server.get("/ready")
                assert answer.json() == {"state": "stalled", "reason": "engine_stalled"}
                assert answer.headers["retry-after"] and server.get("/health").status_code == 503
                with ThreadPoolExecutor() as pool:
                    waiting = pool.submit(complete, server)
                    wait_until(lambda: not alive(engine), SECONDS)
                    assert waiting.result() == expected, "it waited for the other engine"
                rest = list(data)
        assert rest[-1] == "[DONE]" and json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
        wait_until(lambda: server.get("/ready").status_code == 200, SECONDS)
        assert set(probes.counts("/live")) == {200}
        log = server.output()
        assert "the engine has made no progress for" in log and "and is stopped" in log
        assert "it made no progress and was killed; it is started again" in log


def test_an_engine_with_nothing_to_do_is_seen_too_and_may_go_on() -> None:
    with serving("demo", *SMALL, command=hurried(kill=1000)) as server:
        with stopped(server.engine_pid()):
            wait_until(lambda: server.get("/ready").status_code == 503, SECONDS)
        wait_until(lambda: server.get("/ready").status_code == 200, SECONDS)
        complete(server)
        assert "the engine makes progress again" in server.output()
        with server.stream("/v1/completions", LONG, SECONDS) as response:
            data = events(response)
            next(data)
            with stopped(server.engine_pid()):
                time.sleep(0.3)  # between two steps there is nothing to name, but hardly a moment
            list(data)
        wait_until(lambda: bool(holdups(server.output())), SECONDS, "what stood still in a step is named")


def test_a_rank_that_hangs() -> None:
    with serving("demo", *SMALL, "-tp", "2", command=hurried()) as server:
        expected, engine = complete(server), server.engine_pid()
        with stopped(server.rank_pids()[1]):
            wait_until(lambda: server.get("/ready").json().get("state") == "stalled", SECONDS)
            wait_until(lambda: not alive(engine), SECONDS)
        assert complete(server) == expected
        assert server.engine_pid() != engine


def test_requests_go_around_a_replica_that_hangs() -> None:
    with serving("demo", *SMALL, "--data-parallel-size", "2", command=hurried(kill=1000)) as server:
        wait_until(lambda: server.numbers("facet:replicas_alive") == {"": 2}, SECONDS)
        with stopped(server.engine_pids()[0]):
            wait_until(lambda: "has made no progress" in server.output(), SECONDS)
            assert server.get("/ready").status_code == 200
            assert len({complete(server) for _ in range(4)}) == 1


def test_an_only_api_process_that_hangs_is_spoken_for_and_replaced() -> None:
    with serving("demo", *SMALL, command=hurried(kill=8)) as server:
        [hanging], engine = server.api_pids(), server.engine_pid()
        with stopped(hanging), probing(server.port, "/live") as probes:
            spoken = server.get("/ready")  # the supervisor accepts it
            assert spoken.status_code == 503 and spoken.json()["error"]["type"] == "api_stalled"
            wait_until(lambda: not alive(hanging), SECONDS)
            wait_until(lambda: server.get("/ready").status_code == 200, SECONDS)
        assert probes.refused == 0 and server.engine_pid() == engine
        complete(server)


def test_one_api_process_of_two_that_hangs_is_replaced() -> None:
    with serving("demo", *SMALL, "--api-server-count", "2", command=hurried()) as server:
        hanging = server.api_pids()[0]
        with stopped(hanging):
            wait_until(lambda: not alive(hanging), SECONDS)
            wait_until(lambda: len(server.api_pids()) == 2, SECONDS)
        complete(server)


def test_a_pause_of_all_processes_harms_none() -> None:
    with serving("demo", *SMALL, command=hurried(2.0, 3.0)) as server:
        with server.stream("/v1/completions", LONG, SECONDS) as response:
            data = events(response)
            next(data)
            pids = [server.process.pid, *server.children()]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(4)
            for pid in reversed(pids):
                os.kill(pid, signal.SIGCONT)
            assert list(data)[-1] == "[DONE]"
        assert set(pids) <= {server.process.pid, *server.children()}
        assert "is killed" not in server.output()


@pytest.mark.parametrize("which", ["engine", "API process"])
def test_a_stopped_process_does_not_hold_up_the_end(which: str) -> None:
    with serving("demo", *SMALL) as server:
        pid = server.engine_pid() if which == "engine" else server.api_pids()[0]
        with stopped(pid):
            began = time.monotonic()
            assert server.terminate(20) == 0
            assert time.monotonic() - began < 12, "a second if the machine does nothing else"


def test_systemd_hears_of_the_start_of_life_and_of_the_end(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address)
        listener.settimeout(SECONDS)
        environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "60000000"}
        with serving("demo", *SMALL, env=environment) as server:
            notices = set[str]()
            while not notices >= {"READY=1", "WATCHDOG=1"}:
                notices.add(listener.recv(4096).decode().partition("\n")[0])
            assert notices == {"READY=1", "WATCHDOG=1"}
            server.process.send_signal(signal.SIGTERM)
            while "STOPPING=1" not in notices:
                notices.add(listener.recv(4096).decode().partition("\n")[0])
            assert server.process.wait(SECONDS) == 0
