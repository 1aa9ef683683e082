"""Whole steps by joined kernels: equal tokens, few launches, and the choice between them and single ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted import DEVICE  # before any kernel is imported
from meta_cuda import Counted, MetaCuda, opened
from recorded_graphs import RecordedGraphs
from sizes import worker_config
from tiny import tiny_checkpoint, tiny_config
from torch import Tensor

from models import ops
from models.config import read_config
from models.context import ForwardContext, use_context
from models.loader import LoadOptions, load_model
from models.model import ServedModel
from worker.kernels.cuda.capabilities import COUNTERS, Card
from worker.kernels.cuda.fused.choice import JoinedSteps
from worker.kernels.cuda.launch import KernelLaunch, joined, joining, taking
from worker.kernels.cuda.operations import cuda_operations
from worker.kernels.cuda.steps.graph_capture import GraphRecording, Recorder
from worker.ranks.process_groups import Groups

ON_A_CARD = DEVICE.type != "cpu"
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {},  # norms of heads
    "GlmForCausalLM": {"attention_bias": True, "partial_rotary_factor": 0.5},  # neighbours are turned
}
JOINED = ["project_heads", "attend", "add_product", "project_gates", "add_product"]
MOST_OF_QWEN3 = 154
"""The most launches of a step of all 28 layers."""


@pytest.fixture(autouse=True)
def _operations() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    ops.use(cuda_operations(Card(90, 2)))
    yield
    ops.use({})


def decode(model: ServedModel, *, joins: bool) -> tuple[Tensor, Tensor, list[str]]:
    """The greedy tokens of two rows, the last hidden states, and the kernels of the first step."""
    size, names = 4, list[str]()
    for layer in model.attention_layers():
        layer.kv = torch.zeros(layer.cache_shape(4, size), device=DEVICE)
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)
    chosen, hidden = [torch.tensor([5, 9], device=DEVICE)], torch.empty(0)

    def start(call: KernelLaunch) -> None:
        names.append(call.kernel.fn.__name__)
        call.start()

    for at in range(3):
        step = ForwardContext(
            positions=torch.full((2,), at, device=DEVICE),
            query_starts=torch.arange(3, dtype=torch.int32, device=DEVICE),
            kv_lens=torch.full((2,), at + 1, dtype=torch.int32, device=DEVICE),
            block_table=torch.arange(4, dtype=torch.int32, device=DEVICE).view(2, 2),
            slot_mapping=torch.tensor([at, 2 * size + at], device=DEVICE),
            block_size=size,
            query_lens_host=[1, 1],
            kv_lens_host=[at + 1] * 2,
        )
        with use_context(step), joining(counters) if joins else nullcontext(), taking(start):
            hidden = model.forward(chosen[-1], step.positions)
            chosen.append(model.logits(hidden).argmax(-1))
    return torch.stack(chosen), hidden, names[: len(names) // 3]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_tokens_are_those_of_single_kernels(architecture: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(architecture, tmp_path, num_hidden_layers=2, **FAMILIES[architecture])
    with torch.inference_mode():
        model = load_model(LoadOptions(read_config(folder), folder, dtype=torch.float32, device=DEVICE))
        tokens, hidden, kernels = decode(model, joins=True)
        expected, near, _ = decode(model, joins=False)
    assert kernels == ["find_angles", *JOINED, *JOINED, "norm"]
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(hidden, near, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(ON_A_CARD, reason="tensors of no device are not tensors of a card")
def test_a_step_of_one_row_is_few_launches(tmp_path: Path) -> None:
    """All that a card launches for a step in the shape of Qwen3-0.6B, but with two layers, to its token."""
    tiny_config(
        "Qwen3ForCausalLM",
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    ).save_pretrained(tmp_path)
    config = worker_config(
        folder=str(tmp_path),
        model=read_config(tmp_path),
        dtype="bfloat16",
        load_format="dummy",
        max_num_seqs=1,
        max_model_len=4096,
        num_gpu_blocks_override=256,
    )
    launched: list[list[str]] = []

    class Noting(MetaCuda):
        def __call__(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
            names: list[str] = []
            with Counted() as counted, taking(lambda call: names.append(call.kernel.fn.__name__)):
                made = work()
            launched.append([*names, *(name for name in counted.operations if "empty" not in name)])
            return made, lambda: None

    with opened(config, Noting(1, joins=True)) as (runner, _):
        runner.prepare()
    assert [name for name in launched[0] if name in JOINED] == 2 * JOINED
    assert len(launched[0]) + 26 * len(JOINED) <= MOST_OF_QWEN3, launched[0]


def record(seconds: Callable[[], float]) -> tuple[list[bool], GraphRecording[int]]:
    """Record a step of two rows: whether each of its works was joined, and the recording that was kept."""
    ways: list[bool] = []

    class Timed(RecordedGraphs):
        def seconds(self, replay: Callable[[], None]) -> float:
            return seconds()

    def work() -> int:
        ways.append(joined() is not None)
        return len(ways)

    recorder = Recorder(Timed(), Groups())
    kept: Any = JoinedSteps(torch.device("cpu")).record(recorder, 2, lambda: work)
    return ways, kept


@pytest.mark.parametrize("faster", [True, False])
def test_what_the_device_does_sooner_is_kept(faster: bool) -> None:
    times = iter([1.0, 2.0] * 3 if faster else [2.0, 1.0] * 3)
    ways, kept = record(lambda: next(times))
    assert ways == [True, True, False, False]
    assert kept.result == (2 if faster else 4)


def test_a_step_that_cannot_be_joined_is_recorded_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    def work() -> int:
        if joined() is not None:
            raise RuntimeError("no")
        return 7

    steps = JoinedSteps(torch.device("cpu"))
    recorder = Recorder(RecordedGraphs(), Groups())
    made: list[Any] = [steps.record(recorder, 4, lambda: work) for _ in range(2)]
    assert [each.result for each in made] == [7, 7]
    assert caplog.messages == ["steps of 4 rows are computed by single kernels: no"]
