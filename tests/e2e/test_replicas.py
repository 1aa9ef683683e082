"""Several replicas: on one machine under load, and on two that are loopback addresses."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
from live import SMALL, LiveServer, complete, serving, wait_until
from ports import free_ports

pytestmark = pytest.mark.turns(3)

KEY = {"FACET_CLUSTER_KEY": "a secret that both machines know"}

T = TypeVar("T")


@pytest.fixture(scope="module")
def two() -> Iterator[LiveServer]:
    with serving("demo", *SMALL, "-dp", "2", "--max-num-seqs", "2") as server:
        wait_until(lambda: alive(server) == 2, 30, server.output)
        yield server


def alive(server: LiveServer) -> float:
    return server.numbers("facet:replicas_alive")[""]


def at_once(ask: Callable[[int], T], count: int) -> list[T]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(ask, range(count)))


def test_requests_spread(two: LiveServer) -> None:
    at_once(lambda n: complete(two, f"A story about {n} friends", 10), 8)
    wait_until(lambda: two.numbers("vllm:num_requests_running") == {"0": 0, "1": 0}, 5)
    computed = two.numbers("vllm:prefix_cache_queries_total")
    assert computed.keys() == {"0", "1"} and min(computed.values()) > 10
    assert two.listening() == {("127.0.0.1", two.port)}


def test_prompts_that_begin_alike_meet_in_one_place(two: LiveServer) -> None:
    beginnings = ["One day the boy went to the sea. " * 20, "It was cold, and the cat was sad. " * 20]
    for n in range(4):
        at_once(lambda one, n=n: complete(two, f"{beginnings[one]} Then {n}", 2), 2)
    wait_until(lambda: two.numbers("vllm:num_requests_running") == {"0": 0, "1": 0}, 5)
    hits = two.numbers("vllm:prefix_cache_hits_total")
    # Each of the two has one of the beginnings, and finds it three times.
    assert min(hits.values()) > 3 * 100
    at_once(lambda n: complete(two, f"{beginnings[0]} At last {n}", 2), 1)
    wait_until(lambda: sum(two.numbers("vllm:prefix_cache_hits_total").values()) > sum(hits.values()), 5)
    after = two.numbers("vllm:prefix_cache_hits_total")
    assert sum(after[engine] > hits[engine] for engine in hits) == 1


@pytest.mark.slow
def test_a_killed_replica_loses_nothing(two: LiveServer) -> None:
    tokens = 400  # long enough for some to be under way
    expected = complete(two, "Once upon a time", tokens)
    first, second = two.engine_pids()

    def ask(n: int) -> str | None:
        if n == 11:  # the others are on their way
            os.kill(first, signal.SIGKILL)
            return None
        return complete(two, "Once upon a time", tokens)

    assert at_once(ask, 12)[:-1] == [expected] * 11
    assert two.get("/health").status_code == 200
    wait_until(lambda: alive(two) == 2, 20, two.output)
    assert "engine 0 has ended: it was ended by SIGKILL" in two.output()
    assert "it is started again" in two.output()
    assert second in two.engine_pids() and first not in two.engine_pids()


@pytest.mark.slow
def test_replicas_of_two_machines_serve_together() -> None:
    port = free_ports(2, "127.0.0.2")
    place = ("-dp", "2", "--data-parallel-address", "127.0.0.2", "--data-parallel-rpc-port", str(port))
    away = ("--headless", "--data-parallel-start-rank", "1")
    machines = [LiveServer("demo", *SMALL, *place, *away, env=KEY)]  # it waits for the API
    try:
        with serving("demo", *SMALL, *place, "--data-parallel-size-local", "1", env=KEY) as api:
            wait_until(lambda: alive(api) == 2, 30, lambda: api.output() + machines[0].output())
            assert api.listening() == {("127.0.0.1", api.port), ("127.0.0.2", port), ("127.0.0.2", port + 1)}
            assert machines[0].listening() == set()
            at_once(lambda n: complete(api, f"A story about {n} friends", 10), 8)
            wait_until(lambda: api.numbers("vllm:num_requests_running") == {"0": 0, "1": 0}, 5)
            assert min(api.numbers("vllm:prefix_cache_queries_total").values()) > 10

            other_key = {"FACET_CLUSTER_KEY": "another secret, just as long"}
            machines.append(LiveServer("demo", *SMALL, *place, *away, env=other_key))
            assert machines[1].process.wait(60) == 2
            assert "set the same FACET_CLUSTER_KEY on all machines" in machines[1].output()

            assert machines[0].terminate() == 0
            wait_until(lambda: alive(api) == 1, 10)
            complete(api, "Hello", 2)
            assert api.terminate() == 0
    finally:
        for machine in machines:
            machine.close()
