"""Servers that are one of several behind a load balancer, each with its own replicas."""

import httpx
import pytest
from live import SMALL, complete, refusal, serving, wait_until

pytestmark = pytest.mark.turns(5)


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
    assert "of -dp 2 the last is 1" in refusal("demo", "-dp", "2", "--data-parallel-rank", "2")
