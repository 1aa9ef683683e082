"""A server that sleeps: its memory, what its routes say meanwhile, and its answers afterwards."""

from pathlib import Path

import pytest
from live import SMALL, LiveServer, complete, serving, wait_until

SLEEPS = (*SMALL, "--enable-sleep-mode")


def resident(pid: int) -> int:
    """The bytes of a process that no other one shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private"))


def sleep_and_wake(server: LiveServer, query: str = "") -> None:
    before = complete(server)
    assert server.post(f"/sleep{query}", {}).json() == {"is_sleeping": True}
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 503
    assert server.get("/health").status_code == 200 and server.get("/ready").status_code == 503
    for count in (3, 4):  # the second time it is awake already
        assert server.post("/wake_up", {}).json() == {"is_sleeping": False}
        assert complete(server) == before
        bound = {"prompt": "x", "structured_outputs": {"regex": f"[ab]{{{count}}}{query[-1:]}"}}
        assert server.post("/v1/completions", bound, timeout=10).status_code == 200, (
            "a new grammar is compiled"
        )


@pytest.mark.slow(3)
def test_memory_goes_back_and_answers_stay_the_same() -> None:
    with serving("demo", *SLEEPS, "--dtype", "float32", "--kv-cache-memory-bytes", "512M") as server:
        sleep_and_wake(server)
        pid = server.engine_pid()
        prompt = "Once upon a time " * 200
        server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
        awake = resident(pid)
        assert server.post("/sleep?level=2", {}).status_code == 200
        assert resident(pid) < awake - (50 << 20), (awake >> 20, resident(pid) >> 20)
        assert server.post("/wake_up", {}).status_code == 200
        sleep_and_wake(server, "?level=2")


@pytest.mark.slow
def test_replicas_and_ranks_sleep_and_every_api_process_knows() -> None:
    flags = ("-dp", "2", "-tp", "2", "--api-server-count", "2")
    with serving("demo", *SLEEPS, *flags) as server:
        wait_until(lambda: server.numbers("facet:replicas_alive")[""] == 2, 60, server.output)
        before = complete(server)
        assert len(server.rank_pids()) == 4
        assert server.post("/sleep", {}).status_code == 200
        wait_until(lambda: not server.rank_pids(), 10)
        for _ in range(8):  # connections go to either process
            assert server.get("/is_sleeping").json() == {"is_sleeping": True}
        assert server.post("/wake_up", {}).status_code == 200
        assert len(server.rank_pids()) == 4
        assert [complete(server) for _ in range(4)] == [before] * 4
