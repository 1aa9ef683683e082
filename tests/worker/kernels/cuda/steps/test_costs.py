"""The cost of a decoding step in counts: what a card launches for a layer, and what the host does to replay.

What the host does shows on torch's "meta" device, whose tensors have no values: kernels are taken there, not
started, and whatever would wait is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted_device import CARD, ON_A_CARD, Interpreted
from meta_device import Meta, NoMixing
from recorded_graphs import launches
from sizes import worker_config
from tiny import tiny_checkpoint

from models import ops
from models.config import read_config
from worker import runner as runner_module
from worker.devices.cpu import Cpu
from worker.kernels.cuda import table
from worker.kernels.cuda.launch import Call, taking
from worker.kernels.cuda.sampling.draw import draw, draw_into
from worker.kernels.cuda.steps.graphs import Graphs
from worker.protocol import NewSeq, Sampling, SeqStep, StepInput
from worker.runner import Runner
from worker.steps.compute import Compute, Computing
from worker.steps.warmup import warm_up_steps

LAUNCHES_OF_A_LAYER = 10
OPERATIONS_REPLAYED, OPERATIONS_OF_A_MIXED_STEP = 5, 25

pytestmark = pytest.mark.skipif(ON_A_CARD, reason="tensors of no device are no tensors of a card")


class MetaCuda(Meta):
    """A card that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.draw = table.bind(CARD), draw
        self.replays = 0

    def quickened(self, compute: Compute, *, replays: bool) -> Computing:
        return Graphs(compute, CARD, self._capture, draw_into, most=4)

    def _capture(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        def replay() -> None:
            self.replays += 1

        return work(), replay


class Counted(NoMixing):
    """Counts operations that are not views, and the copies from the host among them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []
        self.sent = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.sent += args[0].is_meta and not args[1].is_meta
        if not getattr(func, "is_view", False):
            self.operations.append(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.fixture
def kernels() -> Iterator[list[Call]]:
    """The kernels that would be started."""
    calls: list[Call] = []
    with taking(calls.append):
        yield calls


@pytest.fixture
def open_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Cpu, Path, int], Runner]]:
    """The function that opens a worker on a device, with a model of so many layers, and warms it up."""

    def warm_up(self: Runner) -> tuple[()]:
        for step in warm_up_steps(self.facts, slot=self._slots.dummy):
            self.launch(step)  # no result is read: there may be none
        return ()

    def opened(device: Cpu, folder: Path, layers: int) -> Runner:
        tiny_checkpoint("LlamaForCausalLM", folder, num_hidden_layers=layers, max_position_embeddings=4096)

        def open_device(_: object) -> Cpu:
            ops.use(device.kernels)
            return device

        monkeypatch.setattr(runner_module, "open_device", open_device)
        monkeypatch.setattr(Runner, "_warm_up", warm_up)
        config = worker_config(
            folder=str(folder),
            model=read_config(folder),
            max_num_seqs=2,
            block_size=4,
            max_model_len=4096,  # so long that keys are split
            num_gpu_blocks_override=1024,
        )
        return Runner(config, lambda phase, part: None)

    yield opened
    ops.use({})


def decode(runner: Runner, at: int) -> Counted:
    """What the host does for a step of two rows, which gain a block each at position 4."""
    seqs = [SeqStep(slot, at, 1, [2 * slot + 1] if at == 4 else [], True, at - 2) for slot in range(2)]
    with Counted() as counted:
        runner.launch(StepInput(at, [], seqs))
    return counted


@pytest.mark.usefixtures("kernels")
def test_a_replayed_step_is_one_copy_and_hardly_an_operation(
    tmp_path: Path, open_on: Callable[..., Runner]
) -> None:
    device = MetaCuda()
    runner = open_on(device, tmp_path, 2)
    params = Sampling(max_tokens=9, temperature=0.5)
    new = [NewSeq(slot, [5, 6, 7], 3, params) for slot in range(2)]
    with Counted() as prompts:
        runner.launch(StepInput(1, new, [SeqStep(slot, 0, 3, [2 * slot], True) for slot in range(2)]))
    assert (prompts.sent, device.replays) == (1, 0)
    assert len(prompts.operations) > OPERATIONS_OF_A_MIXED_STEP, "it was computed as it comes"
    for at in (3, 4):
        counted = decode(runner, at)
        assert counted.sent == 1
        assert len(counted.operations) <= OPERATIONS_REPLAYED, counted.operations
    assert device.replays == 2


@pytest.mark.usefixtures("kernels")
def test_a_replayed_mixed_step_is_one_copy_and_what_follows_its_layers(
    tmp_path: Path, open_on: Callable[..., Runner]
) -> None:
    """A prompt that is sampled, beside a decoding row: tables are written, two rows of logits follow."""
    device = MetaCuda()
    runner = open_on(device, tmp_path, 2)
    while runner.prepare():
        pass
    params = Sampling(max_tokens=9, temperature=0.5)
    first, second = (NewSeq(slot, [5, 6, 7], 3, params) for slot in range(2))
    with Counted() as counted:
        runner.launch(StepInput(1, [first], [SeqStep(0, 0, 3, [0], True)]))
    assert (counted.sent, device.replays) == (1, 1)
    with Counted() as counted:
        runner.launch(StepInput(2, [second], [SeqStep(0, 3, 1, [], True, 1), SeqStep(1, 0, 3, [2], True)]))
    assert (counted.sent, device.replays) == (1, 2)
    assert len(counted.operations) <= OPERATIONS_OF_A_MIXED_STEP, counted.operations


def test_a_layer_is_a_few_launches(tmp_path: Path, open_on: Callable[..., Runner]) -> None:
    """Steps of single tokens have one launch of attention, others two, which begin with zeros."""
    decoding: list[list[str]] = []
    mixed: list[list[str]] = []
    for layers in (1, 2):
        (folder := tmp_path / str(layers)).mkdir()
        device = Interpreted(most_tokens=16)
        open_on(device, folder, layers).close()
        decoding.append(launches(device.graphs.captured[0]))
        mixed.append(launches(device.graphs.captured[-1]))
    for (fewer, more), most in ((decoding, LAUNCHES_OF_A_LAYER), (mixed, LAUNCHES_OF_A_LAYER + 2)):
        assert "join" in fewer, "keys are split"
        assert len(more) - len(fewer) <= most
