"""Ranks and stages answer with guesses as one worker does token by token, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
from drawn_drafts import Writer, Written, alone, partly_right
from opened import open_runner
from ranks import Layout, Ranks, RanksOfTests
from sizes import worker_config
from tiny import tiny_checkpoint

from models.config import read_config
from worker.protocol import Sampling

SIZES: dict[str, Any] = {
    "max_num_seqs": 4,
    "block_size": 4,
    "num_gpu_blocks_override": 96,
    "max_model_len": 64,
}
HYBRID = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 72,
}
PROMPTS = [[5, 17, 40, 99, 250, 31, 8], [300], [11, 12, 13, 11, 12, 13, 7, 200, 4, 90]]
PARAMS = Sampling(
    max_tokens=12,
    temperature=1.2,
    seed=5,
    top_p=0.95,
    repetition_penalty=1.3,
    logprobs=2,
    bad_words=((7, 9),),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("Gemma2ForCausalLM", tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("Qwen3_5ForCausalLM", tmp_path_factory.mktemp("hybrid"), **HYBRID)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [Layout(2), Layout(1, 2), Layout(2, 2)], ids=str)
def test_layouts(folder: Path, ranks: Ranks, layout: Layout, dtype: str) -> None:
    """The first stage writes guesses over tokens that the last one has sent back."""
    compare(folder, ranks, layout, dtype)


@pytest.mark.parametrize("layout", [Layout(2), Layout(1, 2), Layout(1, 3), Layout(2, 2)], ids=str)
def test_hybrids(hybrid: Path, ranks: Ranks, layout: Layout) -> None:
    """States in each stage go on by the guesses that hold, which the last one tells."""
    compare(hybrid, ranks, layout, "bfloat16")


def compare(folder: Path, ranks: Ranks, layout: Layout, dtype: str) -> None:
    given = {**SIZES, "dtype": dtype, "cpu_threads": 1, "guesses": True}
    runner = open_runner(folder, **given)
    truth = alone(runner, [(prompt, PARAMS) for prompt in PROMPTS])
    runner.close()
    config = worker_config(folder=str(folder), model=read_config(folder), **given)
    executor = RanksOfTests(ranks, layout, config)
    facts = executor.start()
    assert facts.most_rows == 64
    for seed, plan in enumerate([[(0, [])], [(4, [])], [(2, [7, 8, 9]), (0, [3, 4]), (1, [])]]):
        writer = Writer(executor.submit, blocks=96, block_size=4, groups=len(facts.windows), seed=seed)
        found = writer.write([Written(prompt, PARAMS) for prompt in PROMPTS], partly_right(truth, plan))
        assert [(each.output, each.logprobs) for each in found] == [
            (each.output, each.logprobs) for each in truth
        ]
    executor.stop()


def test_a_hybrid_in_stages_with_states_on_disk_takes_no_guesses(
    hybrid: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """A state might be written before it has gone on by the guesses that hold."""
    given = {**SIZES, "cpu_threads": 1, "guesses": True, "kv_cache_dir": str(tmp_path)}
    executor = RanksOfTests(
        ranks, Layout(1, 2), worker_config(folder=str(hybrid), model=read_config(hybrid), **given)
    )
    assert executor.start().most_rows == 0
    executor.stop()
