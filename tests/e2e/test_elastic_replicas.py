"""Replicas come and go while requests run, and servers that are one of several behind a load balancer."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from live import SMALL, LiveServer, chunks, complete, refusal, serving, wait_until

pytestmark = pytest.mark.turns(5)


@pytest.fixture(scope="module")
def elastic() -> Iterator[LiveServer]:
    with serving("demo", *SMALL, "--enable-elastic-ep") as server:
        yield server


def scale(server: LiveServer, size: object, **fields: object) -> httpx.Response:
    return server.post("/scale_elastic_ep", {"new_data_parallel_size": size, **fields}, timeout=120)


class Load(threading.Thread):
    """Sends requests one after the other, every other one streamed, and keeps what is wrong with answers."""

    def __init__(self, server: LiveServer, over: threading.Event) -> None:
        super().__init__()
        self.server, self.over = server, over
        self.done = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        while not self.over.is_set():
            body = {"prompt": f"A story of {self.done}", "max_tokens": 24, "ignore_eos": True}
            streams = self.done % 2 == 0
            told = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
            answer = self.server.post("/v1/completions", {**body, **told})
            self.done += 1
            if answer.status_code != 200:
                self.wrong.append(answer.text)
            else:
                last = chunks(answer)[-1] if streams else answer.json()
                if last["usage"]["completion_tokens"] != 24:
                    self.wrong.append(answer.text)
            self.over.wait(0.05)  # all starting engines share the processor with these requests


@pytest.mark.slow
def test_no_request_is_lost_while_replicas_come_and_go(elastic: LiveServer) -> None:
    over = threading.Event()
    load = [Load(elastic, over) for _ in range(6)]
    for each in load:
        each.start()
    try:
        for size in (3, 1, 2, 1):
            answer = scale(elastic, size, drain_timeout=0.05 if size == 1 else 30)
            assert answer.status_code == 200, answer.text + elastic.output()
            assert answer.json() == {"message": f"Scaled to {size} data parallel engines"}
            told = elastic.post("/is_scaling_elastic_ep", {})
            assert told.json() == {"is_scaling_elastic_ep": False}
            assert elastic.numbers("facet:replicas_alive")[""] == size
            time.sleep(1.0)
            computed = elastic.numbers("vllm:prefix_cache_queries_total")
            assert set(computed) == {str(number) for number in range(size)} and min(computed.values()) > 0
    finally:
        over.set()
        for each in load:
            each.join()
    assert not [wrong for each in load for wrong in each.wrong]
    assert sum(each.done for each in load) > 30


def test_an_added_replica_is_kept_running(elastic: LiveServer) -> None:
    assert scale(elastic, 2).status_code == 200
    _, pid = elastic.engine_pids()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len({*elastic.engine_pids()} - {pid}) == 2, 60, elastic.output)
    wait_until(lambda: elastic.numbers("facet:replicas_alive")[""] == 2, 60, elastic.output)
    answer = scale(elastic, 1)
    assert answer.status_code == 200, answer.text


def test_a_wrong_number_is_refused(elastic: LiveServer) -> None:
    for body in ({}, {"size": 2}, {"new_data_parallel_size": 0}, {"new_data_parallel_size": "2"}):
        answer = elastic.post("/scale_elastic_ep", body)
        assert answer.status_code == 400 and "new_data_parallel_size" in json.dumps(answer.json())


def test_a_server_without_the_switch_stays_as_it_is(demo: LiveServer) -> None:
    answer = scale(demo, 2)
    assert answer.status_code == 400 and "--enable-elastic-ep" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_each_rank_has_a_server_of_its_own() -> None:
    """As LeaderWorkerSet and llm-d start them."""
    with serving(
        "demo", *SMALL, "-dp", "4", "--data-parallel-rank", "2", "--data-parallel-external-lb"
    ) as rank:
        assert complete(rank)
        assert rank.get("/health").status_code == 200
        assert set(rank.numbers("vllm:prefix_cache_queries_total")) == {"2"}
        assert set(rank.numbers("vllm:generation_tokens_total")) == {"2"}
        wrong = httpx.post(
            f"{rank.url}/v1/completions", json={"prompt": "a"}, headers={"X-data-parallel-rank": "1"}
        )
        assert wrong.status_code == 400 and "numbered from 2 to 2" in wrong.text


@pytest.mark.slow
def test_each_machine_has_a_server_of_its_own() -> None:
    flags = ("-dp", "4", "--data-parallel-hybrid-lb", "--data-parallel-size-local", "2", "-dpr", "2")
    with serving("demo", *SMALL, *flags) as machine:
        wait_until(lambda: machine.numbers("facet:replicas_alive")[""] == 2, 60, machine.output)
        assert complete(machine)
        assert set(machine.numbers("vllm:num_requests_running")) == {"2", "3"}


def test_a_rank_that_is_not_there_is_refused() -> None:
    assert "of --data-parallel-size 2 the last is 1" in refusal(
        "demo", "-dp", "2", "--data-parallel-rank", "2"
    )
