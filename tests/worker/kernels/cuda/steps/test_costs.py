"""The cost of a decoding step in counts: what a card launches for a layer, and what the host does to replay.

What the host does shows on torch's "meta" device, whose tensors have no values: kernels are taken there, not
started, and whatever would wait is an error.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from interpreted_device import ON_A_CARD, Interpreted
from meta_cuda import Counted, MetaCuda, opened
from recorded_graphs import launches
from sizes import worker_config
from tiny import tiny_checkpoint

from models.config import read_config
from worker.config import WorkerConfig
from worker.protocol import NewSeq, Sampling, SeqStep, StepInput
from worker.runner import Runner

LAUNCHES_OF_A_LAYER = {"LlamaForCausalLM": 10, "Qwen3MoeForCausalLM": 13, "GptOssForCausalLM": 13}
OPERATIONS_REPLAYED, OPERATIONS_OF_A_MIXED_STEP = 5, 4

pytestmark = pytest.mark.skipif(ON_A_CARD, reason="tensors of no device are not tensors of a card")


def config_of(folder: Path, layers: int, architecture: str = "LlamaForCausalLM") -> WorkerConfig:
    """A worker of a model with so many layers, whose sequences are so long that keys are split."""
    given: dict[str, Any] = {"num_hidden_layers": layers, "max_position_embeddings": 4096}
    if architecture == "GptOssForCausalLM":
        given |= {"layer_types": ["full_attention"] * layers, "rope_parameters": {"rope_theta": 10000.0}}
    tiny_checkpoint(architecture, folder, **given)
    return worker_config(
        folder=str(folder),
        model=read_config(folder),
        max_num_seqs=2,
        block_size=4,
        max_model_len=4096,
        num_gpu_blocks_override=1024,
    )


def decode(runner: Runner, at: int) -> Counted:
    """What the host does for a step of two rows, which gain a block each at position 4."""
    seqs = [SeqStep(slot, at, 1, [2 * slot + 1] if at == 4 else [], True, at - 2) for slot in range(2)]
    with Counted() as counted:
        runner.launch(StepInput(at, [], seqs))
    return counted


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[tuple[Runner, MetaCuda]]:
    """A worker that replays steps of two rows and four tokens."""
    device = MetaCuda(4)
    with opened(config_of(tmp_path, 2), device) as (runner, _):
        yield runner, device


def test_a_replayed_step_is_one_copy_and_hardly_an_operation(worker: tuple[Runner, MetaCuda]) -> None:
    runner, device = worker
    params = Sampling(max_tokens=9, temperature=0.5)
    new = [NewSeq(slot, [5, 6, 7], 3, params) for slot in range(2)]
    with Counted() as prompts:
        runner.launch(StepInput(1, new, [SeqStep(slot, 0, 3, [2 * slot], True) for slot in range(2)]))
    assert (prompts.sent, device.replays) == (1, 0)
    assert len(prompts.operations) > 5 * OPERATIONS_OF_A_MIXED_STEP, "it was computed as it comes"
    for at in (3, 4):
        counted = decode(runner, at)
        assert counted.sent == 1
        assert len(counted.operations) <= OPERATIONS_REPLAYED, counted.operations
    assert device.replays == 2


def test_a_replayed_mixed_step_is_one_copy_and_what_writes_tables(
    worker: tuple[Runner, MetaCuda],
) -> None:
    """A prompt that is sampled, alone and beside a decoding row: tokens, blocks and states are written."""
    runner, device = worker
    while runner.prepare():
        pass
    params = Sampling(max_tokens=9, temperature=0.5)
    first, second = (NewSeq(slot, [5, 6, 7], 3, params) for slot in range(2))
    with Counted() as counted:
        runner.launch(StepInput(1, [first], [SeqStep(0, 0, 3, [0], True)]))
    assert (counted.sent, device.replays) == (1, 1)
    assert len(counted.operations) <= OPERATIONS_OF_A_MIXED_STEP, counted.operations
    with Counted() as counted:
        runner.launch(StepInput(2, [second], [SeqStep(0, 3, 1, [], True, 1), SeqStep(1, 0, 3, [2], True)]))
    assert (counted.sent, device.replays) == (1, 2)
    assert len(counted.operations) <= OPERATIONS_OF_A_MIXED_STEP, counted.operations


@pytest.mark.parametrize("architecture", LAUNCHES_OF_A_LAYER)
def test_a_layer_is_a_few_launches(architecture: str, tmp_path: Path) -> None:
    """Steps of single tokens have one launch of attention, others two, which begin with zeros."""
    few = LAUNCHES_OF_A_LAYER[architecture]
    decoding: list[list[str]] = []
    mixed: list[list[str]] = []
    for layers in (1, 2):
        (folder := tmp_path / str(layers)).mkdir()
        device = Interpreted(most_tokens=16)
        with opened(config_of(folder, layers, architecture), device):
            pass
        decoding.append(launches(device.graphs.captured[0]))
        mixed.append(launches(device.graphs.captured[-1]))
    for (fewer, more), most in ((decoding, few), (mixed, few + 2)):
        assert "join" in fewer, "keys are split"
        assert len(more) - len(fewer) <= most
