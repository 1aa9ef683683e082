"""Replicas that share experts, as a user starts them: they answer as one model, and end and return as one."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from live import LiveServer, complete, serving, starting, wait_until
from mixtures import FAMILIES
from ports import free_ports
from tiny import tiny_checkpoint

from facet import LLM, SamplingParams

SMALL = (
    *("--dtype", "float32", "--num-gpu-blocks-override", "64"),
    *("--max-num-seqs", "4", "--restart-wait", "60"),
)
KEY = {"FACET_CLUSTER_KEY": "a secret that both machines know"}
PROMPTS = [f"{number} friends went to the sea" for number in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("mixture")
    return tiny_checkpoint("Qwen2MoeForCausalLM", where, **FAMILIES["Qwen2MoeForCausalLM"])


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    """The answers of the same model in one process."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(folder), dtype="float32", num_gpu_blocks_override=64, cpu_threads=1) as llm:
        return [output.outputs[0].text for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def all_at_once(server: LiveServer) -> list[str]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda prompt: complete(server, prompt, 12), PROMPTS))


@pytest.mark.parametrize("transport", ["allgather_reducescatter", "all_to_all"])
def test_replicas_that_share_experts_answer_as_one_model(
    folder: Path, expected: list[str], transport: str
) -> None:
    shared = ("-dp", "2", "--enable-expert-parallel", "--all2all-backend", transport)
    with serving(str(folder), *SMALL, *shared) as server:
        wait_until(lambda: server.numbers("facet:replicas_alive")[""] == 2, 30, server.output)
        assert complete(server, PROMPTS[0], 12) == expected[0], "one works and the other has nothing to do"
        assert all_at_once(server) == expected
        computed = server.numbers("vllm:prefix_cache_queries_total")
        assert computed.keys() == {"0", "1"} and min(computed.values()) > 0, "both have worked"
        assert server.listening() == {("127.0.0.1", server.port)}
        assert "4 of 8 experts" in server.output()
        assert server.terminate(30) == 0


def test_the_end_of_a_rank_ends_all_that_share_its_experts_and_they_return(
    folder: Path, expected: list[str]
) -> None:
    with serving(str(folder), *SMALL, "-dp", "2", "--enable-expert-parallel") as server:
        wait_until(lambda: server.numbers("facet:replicas_alive")[""] == 2, 30, server.output)
        before = server.engine_pids()
        assert complete(server, PROMPTS[0], 12) == expected[0]
        os.kill(server.rank_pids()[0], signal.SIGKILL)
        wait_until(lambda: not set(before) & set(server.engine_pids()), 30, server.output)
        assert complete(server, PROMPTS[1], 12) == expected[1], "it waits for those that take their place"
        wait_until(lambda: server.numbers("facet:replicas_alive")[""] == 2, 30, server.output)
        assert all_at_once(server) == expected


def written(server: LiveServer) -> float:
    return sum(server.numbers("facet:disk_blocks_written_total").values())


def test_prefixes_outlive_replicas_that_share_experts(folder: Path, tmp_path: Path) -> None:
    """Each keeps those of its own requests, and finds those of the other."""
    prompt = "Some friends went to the sea, and what they saw there was told for years. " * 8
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    options = (*SMALL, "-dp", "2", "--enable-expert-parallel", "--enable-prompt-tokens-details")
    found: list[tuple[object, int]] = []
    for _ in range(2):
        with serving(str(folder), *options, "--kv-cache-dir", str(tmp_path)) as server:
            wait_until(lambda: both_work(server), 30, server.output)
            for _ in range(2):
                answer = server.post("/v1/completions", body).json()
                details = answer["usage"]["prompt_tokens_details"] or {}
                found.append((answer["choices"], details.get("cached_tokens", 0)))
            if len(found) == 2:
                wait_until(lambda: written(server) > 0, 10, server.output)
            os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait(30)
    assert [choices for choices, _ in found] == [found[0][0]] * 4
    assert found[0][1] == 0 and found[2][1] > 100


def both_work(server: LiveServer) -> bool:
    return server.numbers("facet:replicas_alive")[""] == 2


def test_replicas_of_two_machines_share_experts_and_end_and_return_as_one(
    folder: Path, expected: list[str]
) -> None:
    """Loopback has an address for each. The other machine stays when that of the API ends."""
    host = "127.0.0.2"
    port = free_ports(3, host) + 1
    shared = ("-dp", "2", "--enable-expert-parallel", "--shutdown-timeout", "10", "--data-parallel-rpc-port")
    place = (*shared, str(port), "--data-parallel-address", host)
    away = ("--headless", "--data-parallel-start-rank", "1")
    with closing(LiveServer(str(folder), *SMALL, *place, *away, env=KEY)) as machine:
        with serving(str(folder), *SMALL, *place, "-dpl", "1", env=KEY) as api:
            wait_until(lambda: both_work(api), 40, lambda: api.output() + machine.output())
            assert all_at_once(api) == expected
            assert min(api.numbers("vllm:prefix_cache_queries_total").values()) > 0, "both have worked"
            assert "4 of 8 experts" in api.output()
            listening = {address for address, _ in api.listening() | machine.listening()}
            assert listening <= {"127.0.0.1", host}, "each at its own address, and nowhere else"
            os.kill(machine.rank_pids()[0], signal.SIGKILL)
            wait_until(lambda: not both_work(api), 20, api.output)
            assert complete(api, PROMPTS[1], 12) == expected[1], "it waits for both"
            wait_until(lambda: both_work(api), 40, lambda: api.output() + machine.output())
            assert all_at_once(api) == expected
            began = time.monotonic()
            assert api.terminate(30) == 0
            assert time.monotonic() - began < 8, "engines of both machines have left"
        assert machine.process.poll() is None
        with serving(str(folder), *SMALL, *place, "-dpl", "1", env=KEY) as api:
            wait_until(lambda: both_work(api), 40, lambda: api.output() + machine.output())
            assert complete(api, PROMPTS[2], 12) == expected[2]
            assert machine.terminate(20) == 0
            wait_until(lambda: not both_work(api), 20, api.output)


def test_servers_behind_a_load_balancer_share_experts(folder: Path, expected: list[str]) -> None:
    host = "127.0.0.2"
    port = free_ports(2, host) + 1
    shared = ("-dp", "2", "--enable-expert-parallel", "--data-parallel-rpc-port", str(port))
    place = (*shared, "--data-parallel-address", host, "--data-parallel-rank")
    with ExitStack() as stack:
        servers = [stack.enter_context(starting(str(folder), *SMALL, *place, rank, env=KEY)) for rank in "10"]
        for server in servers:
            server.wait_ready()
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            ask = [pool.submit(complete, servers[n % 2], prompt, 12) for n, prompt in enumerate(PROMPTS)]
            assert [each.result() for each in ask] == expected
