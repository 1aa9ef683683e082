"""Replicas that share experts, as a user starts them: they answer as one model, and end and return as one."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from live import LiveServer, complete, serving, wait_until
from mixtures import FAMILIES
from tiny import tiny_checkpoint

from facet import LLM, SamplingParams

SMALL = (
    *("--dtype", "float32", "--num-gpu-blocks-override", "64"),
    *("--max-num-seqs", "4", "--restart-wait", "60"),
)
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


@pytest.mark.turns(7)
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_experts_move_and_steps_are_halved_while_answers_stay_the_same(
    folder: Path, expected: list[str]
) -> None:
    moving = ("--enable-eplb", "--eplb-config", '{"num_redundant_experts": 4, "step_interval": 12}')
    halves = ("--enable-dbo", "--dbo-decode-token-threshold", "2", "--dbo-prefill-token-threshold", "8")
    with serving(str(folder), *SMALL, "-dp", "2", "--enable-expert-parallel", *moving, *halves) as server:
        wait_until(lambda: server.numbers("facet:replicas_alive")[""] == 2, 30, server.output)
        for _ in range(3):
            assert all_at_once(server) == expected
        assert sum(server.numbers("vllm:eplb_rearrangements_total").values()) > 0
