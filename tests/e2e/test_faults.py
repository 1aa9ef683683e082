"""Real processes are killed under a real server, whose port goes on to answer."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from holdups import unexplained
from live import COMMAND, LONG, SMALL, LiveServer, alive, complete, events, serving, wait_until
from probes import probing

NO_PAUSES = "import engine_core.restarts; engine_core.restarts.PAUSES = (0.0,); "
IMPATIENT = [*COMMAND[:-1], NO_PAUSES + COMMAND[-1]]
"""The command, but a process is started again once only."""


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serving("demo", *SMALL) as found:
        yield found
        assert not unexplained(found.output())


@pytest.mark.turns(3)
def test_the_process_that_holds_the_port_is_small(server: LiveServer) -> None:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    assert int(status.partition("VmRSS:")[2].split()[0]) < 32 << 10
    assert "libzmq" not in Path(f"/proc/{server.process.pid}/maps").read_text()


def test_requests_wait_for_a_killed_engine(server: LiveServer) -> None:
    expected = complete(server)
    killed = server.engine_pid()
    with probing(server.port, "/live", "/ready") as probes, ThreadPoolExecutor(8) as pool:
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: 503 in probes.counts("/ready"), 5)
        body = server.get("/ready").json()
        assert body["state"] == "restarting" and body["reason"] in ("engine_killed", "engine_lost")
        waiting = [pool.submit(complete, server) for _ in range(8)]
        assert {one.result() for one in waiting} == {expected}
        wait_until(lambda: server.get("/ready").status_code == 200, 5)
    assert set(probes.counts("/live")) == {200}
    assert set(probes.counts("/ready")) == {200, 503}
    assert server.engine_pid() != killed and server.process.poll() is None


@pytest.mark.turns(3)
def test_a_stream_whose_engine_is_killed_goes_on(server: LiveServer) -> None:
    with server.stream("/v1/completions", LONG) as response:
        undisturbed = text_of(list(events(response)))
    with server.stream("/v1/completions", LONG) as response:
        data = events(response)
        first = next(data)
        os.kill(server.engine_pid(), signal.SIGKILL)
        answer = [first, *data]
    assert text_of(answer) == undisturbed
    complete(server)


def text_of(answer: list[str]) -> str:
    """The text of a stream that is complete."""
    assert answer[-1] == "[DONE]"
    choices = [choice for event in answer[:-1] for choice in json.loads(event)["choices"]]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["text"] for choice in choices)


@pytest.mark.turns(3)
def test_clients_wait_for_a_killed_api_process(server: LiveServer) -> None:
    expected = complete(server)
    [killed], engine = server.api_pids(), server.engine_pid()
    os.kill(killed, signal.SIGKILL)
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(complete, server) for _ in range(8)]
        assert {one.result() for one in waiting} == {expected}
    assert server.engine_pid() == engine, "nothing is wrong with the engine"
    wait_until(lambda: server.numbers("vllm:num_requests_running") == {"0": 0}, 5)


@pytest.mark.turns(3)
def test_stacks_of_all_processes_are_dumped_on_demand(server: LiveServer) -> None:
    server.process.send_signal(signal.SIGUSR1)
    files = ("supervisor.py", "server/run/api_main.py", "engine_core/engine_main.py")
    wait_until(lambda: all(file in server.output() for file in files), 5, server.output)
    complete(server)


@pytest.mark.turns(3)
def test_a_hang_up_without_a_terminal_ends_nothing(server: LiveServer) -> None:
    server.process.send_signal(signal.SIGHUP)
    complete(server)


@pytest.mark.slow
def test_two_api_processes_share_one_engine_and_one_of_them_is_replaced() -> None:
    with serving("demo", *SMALL, "--api-server-count", "2") as server:
        assert len(server.engine_pids()) == 1 and len({complete(server) for _ in range(8)}) == 1
        killed = server.api_pids()[0]
        with probing(server.port, "/live") as probes:
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: len(server.api_pids()) == 2 and not alive(killed), 10)
            complete(server)
        assert probes.refused == 0
        answers = probes.counts("/live")
        assert answers[200] >= answers.total() - 1, "one may have been under way"
        assert server.terminate() == 0


def kill_engines(server: LiveServer) -> None:
    os.kill(server.engine_pid(), signal.SIGKILL)
    wait_until(lambda: server.get("/ready").status_code == 503, 20)
    wait_until(lambda: server.get("/ready").status_code == 200, 20)
    os.kill(server.engine_pid(), signal.SIGKILL)


def kill_api_processes(server: LiveServer) -> None:
    [first] = server.api_pids()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: server.api_pids() not in ([], [first]), 10)
    os.kill(server.api_pids()[0], signal.SIGKILL)


@pytest.mark.turns(7)
@pytest.mark.parametrize("kill_twice", [kill_engines, kill_api_processes])
@pytest.mark.parametrize("leaves", [False, True])
def test_a_process_that_is_given_up(kill_twice: Callable[[LiveServer], None], leaves: bool) -> None:
    flags = ("--exit-on-failure",) if leaves else ()
    with serving("demo", *SMALL, *flags, command=IMPATIENT) as server:
        kill_twice(server)
        if leaves:
            assert server.process.wait(60) == 1
            return
        if kill_twice is kill_engines:
            wait_until(lambda: server.get("/ready").json().get("state") == "dead", 10)
        assert server.get("/live").status_code == 200
        refused = server.post("/v1/completions", {"prompt": "x"})
        assert refused.status_code == 503 and refused.headers["retry-after"]
        reason = "engine_given_up" if kill_twice is kill_engines else "api_given_up"
        assert refused.json()["error"]["type"] == reason
        assert server.terminate() == 0
