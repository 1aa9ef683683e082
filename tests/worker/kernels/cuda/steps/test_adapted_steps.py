"""Steps with adapters are replayed as graphs of their own, for whichever adapters come."""

from pathlib import Path
from typing import Any

import pytest
from adapted_runner import OUTPUTS, call, generate, load
from interpreted_device import ON_A_CARD, Interpreted
from opened import open_runner
from peft_adapters import make_adapter
from recorded_graphs import launches
from tiny import tiny_checkpoint

from worker.calls.messages import DROP_ADAPTER
from worker.options import LoraOptions
from worker.runner import Runner

pytestmark = pytest.mark.skipif(ON_A_CARD, reason="on a card, workers use its kernels anyway")

LORA = LoraOptions(enable_lora=True, max_loras=2, max_cpu_loras=3)
CHOSEN = [{0: (1, 0), 1: (2, 4)}, {0: (3, 0), 1: (0, 0)}, {1: (1, 7)}, {0: (0, 0), 1: (0, 0)}]
"""The adapters of slots, round by round: three take turns in two places, some from a position on."""


def rounds(runner: Runner, folders: list[Path]) -> list[dict[int, list[int]]]:
    """The tokens of each round; the first one's steps report logprobs, too."""
    for number, folder in enumerate(folders, 1):
        load(runner, number, folder)
    return [
        {slot: [token for token, _ in each] for slot, each in generate(runner, chosen, reported).items()}
        for chosen, reported in zip(CHOSEN, (3, None, None, None), strict=True)
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A base, and three adapters of it."""
    base = tiny_checkpoint("Qwen2ForCausalLM", tmp_path_factory.mktemp("base"), num_hidden_layers=1)
    fields: list[dict[str, Any]] = [
        {"r": 4, "target_modules": "all-linear"},
        {"r": 8, "target_modules": ["q_proj", "down_proj", "lm_head"], "use_dora": True},
        {"r": 2, "target_modules": ["v_proj"], "bias": "lora_only"},
    ]
    adapters = [
        make_adapter(base, base.parent / f"adapter-{seed}", seed, **own).folder
        for seed, own in enumerate(fields, 1)
    ]
    return [base, *adapters]


def opened(base: Path) -> Runner:
    return open_runner(base, lora=LORA, max_num_seqs=2, dtype="float32")


@pytest.fixture(scope="module")
def expected(folders: list[Path]) -> list[dict[int, list[int]]]:
    runner = opened(folders[0])
    found = rounds(runner, folders[1:])
    runner.close()
    return found


def test_tokens_are_those_of_the_cpu_and_no_step_was_computed_as_it_comes(
    folders: list[Path], expected: list[dict[int, list[int]]], device: Interpreted
) -> None:
    device.most_tokens = 16
    runner = opened(folders[0])
    while runner.prepare():
        pass
    graphs = [launches(calls) for calls in device.graphs.captured]
    adapted = {number for number, names in enumerate(graphs) if "shrink" in names}
    assert len(adapted) == len(graphs) // 2, "steps without adapters have none of their kernels"
    for number in adapted:  # four layers, and the LM head where a graph goes so far; and the embeddings
        count = {name: graphs[number].count(name) for name in ("shrink", "gather", "expand")}
        assert count in ({"shrink": many, "gather": 1, "expand": many + 1} for many in (4, 5))
    before = len(device.graphs.replayed)
    assert rounds(runner, folders[1:]) == expected
    replayed = device.graphs.replayed[before:]
    steps = OUTPUTS * len(CHOSEN)
    assert len(replayed) == steps
    assert not adapted.intersection(replayed[-steps // len(CHOSEN) :])
    call(runner, DROP_ADAPTER, 1)
    assert generate(runner, {1: (1, 0)}) == generate(runner, {1: (0, 0)})
    runner.close()
