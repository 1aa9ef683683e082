"""A server that is asked to end while clients ask on: the port answers until the process is gone."""

from __future__ import annotations

import http.client
import json
import os
import pty
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest
from live import COMMAND, LONG, PATIENCE, SMALL, LiveServer, events, serving, wait_until
from probes import probing

QUIET = (*SMALL, "--disable-uvicorn-access-log")
MANY = {**LONG, "n": 8}
ENDLESS = {**LONG, "max_tokens": 2000, "n": 8}


@contextmanager
def stream(server: LiveServer, body: dict[str, object]) -> Iterator[Iterator[str]]:
    """The events of a stream of which the first has come."""
    with server.stream("/v1/completions", body) as response:
        data = events(response)
        next(data)
        yield data


def connection(server: LiveServer, stack: ExitStack) -> http.client.HTTPConnection:
    """A connection that is opened by its first request, and closed with the stack."""
    return stack.enter_context(closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)))


def end(server: LiveServer, number: int = signal.SIGTERM) -> tuple[int, float]:
    """Ask the server to end; returns its exit code, and the seconds that it took."""
    began = time.monotonic()
    server.process.send_signal(number)
    return server.process.wait(60), time.monotonic() - began


def assert_told_to_go_elsewhere(*connections: http.client.HTTPConnection) -> None:
    """Requests are refused on these connections, of which the server may have closed one that was idle."""
    answers: list[http.client.HTTPResponse] = []
    for each in connections:
        with suppress(BrokenPipeError, http.client.RemoteDisconnected):
            each.request("POST", "/v1/completions", '{"prompt": "x"}', {"Content-Type": "application/json"})
            answers.append(each.getresponse())
    assert answers
    for answer in answers:
        assert answer.status == 503 and answer.headers["retry-after"]
        assert answer.headers["connection"] == "close"
        assert json.loads(answer.read())["error"]["type"] == "draining"


@pytest.mark.turns
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_streams_finish_and_nobody_is_refused_a_connection(number: int) -> None:
    with (
        ThreadPoolExecutor(1) as pool,
        serving("demo", *QUIET) as server,
        probing(server.port, "/live", "/ready", "/v1/models") as probes,
        ExitStack() as idle,
    ):
        for _ in range(20):  # clients that are not waited for
            kept = connection(server, idle)
            kept.request("GET", "/live")
            kept.getresponse().read()
        gone = pool.submit(lambda: (server.process.wait(), time.monotonic()))  # a thread that is never late
        fresh = connection(server, idle)
        with stream(server, MANY) as data:
            asked = time.monotonic()
            server.process.send_signal(number)
            wait_until(lambda: "stopping: " in server.output(), 5)  # the supervisor says so by /ready before
            assert server.get("/ready").status_code == 503
            assert_told_to_go_elsewhere(kept, fresh)
            rest = list(data)
        finished = time.monotonic()
        code, ended = gone.result()
        wait_until(lambda: probes.refused == 3, 5)
    assert code == 0
    assert rest[-1] == "[DONE]" and json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
    refused = [asked + probes.first(path, "ConnectionRefusedError", asked) for path in probes.seen]
    assert min(refused) > ended - 0.15 * PATIENCE, "the port closes with the process"
    assert probes.first("/ready", 503, asked) < PATIENCE
    live = probes.counts("/live")
    assert live.total() - live[200] <= 2, "one probe may meet the last moment, and the last one nobody"
    assert ended - finished < 3 * PATIENCE, "half a second on a machine that does nothing else"


@pytest.mark.slow
def test_a_delay_lets_load_balancers_notice_first() -> None:
    with serving("demo", *QUIET, "--drain-delay", "4") as server:
        server.process.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        wait_until(lambda: server.get("/ready").status_code == 503, 5)
        body = {"prompt": "x", "max_tokens": 1}
        assert server.post("/v1/completions", body).status_code == 200, "it is taken until the delay is over"
        assert server.process.wait(40) == 0
        assert time.monotonic() - asked >= 4


@pytest.mark.slow
def test_a_second_signal_cuts_streams_off() -> None:
    with serving("demo", *QUIET) as server, stream(server, ENDLESS) as data, ThreadPoolExecutor() as pool:
        reading = pool.submit(list, data)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/ready").status_code == 503, 5)
        code, took = end(server)
        assert code == 0 and took < 3 * PATIENCE
        rest = reading.result()
        assert "[DONE]" not in rest and json.loads(rest[-1])["error"]["code"] == 503


TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
fcntl.ioctl(2, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.slow
def test_a_server_ends_when_its_terminal_is_closed() -> None:
    ours, theirs = pty.openpty()
    command = [COMMAND[0], "-c", TERMINAL, *COMMAND[1:]]
    server = LiveServer("demo", *QUIET, command=command, output=theirs)
    os.close(theirs)
    try:
        server.wait_ready()
        os.close(ours)  # as a window does that is closed
        assert server.process.wait(60) == 0
    finally:
        server.close()
