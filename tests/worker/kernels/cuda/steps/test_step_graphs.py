"""Steps that are replayed as graphs, here by a stand-in that makes recorded calls again, interpreted."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted_device import ON_A_CARD, Interpreted
from recorded_graphs import RecordedGraphs, launches
from replayed import generated
from sizes import worker_config
from tiny import tiny_checkpoint

from engine_core.protocol import AddRequest
from models.config import read_config
from models.context import context
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_attention import DecoderAttention
from worker.kernels.cuda.steps.recorded_forms import Form
from worker.kernels.cuda.steps.step_graphs import ROWS, TOKENS, graph_bytes, sizes_up_to
from worker.protocol import NewSeq, Sampling, SeqStep, StepInput
from worker.runner import Runner
from worker.steps.output import NOT_FINITE

GREEDY = Sampling(max_tokens=9, temperature=0)

pytestmark = pytest.mark.skipif(ON_A_CARD, reason="on a card, workers use its kernels anyway")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("Qwen3ForCausalLM", tmp_path_factory.mktemp("qwen3"), num_hidden_layers=1)


def test_groups_of_layers_are_replayed(tmp_path: Path, device: Interpreted) -> None:
    """A layer with a window has blocks of its own, which it gives back; tokens are those of all blocks."""
    kinds = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    folder = tiny_checkpoint("Gemma3ForCausalLM", tmp_path, **kinds, sliding_window=3)
    requests = [AddRequest(0, [5 + at * at % 300 for at in range(70)], Sampling(max_tokens=7, temperature=0))]
    sizes = {"block_size": 4, "max_model_len": 80, "num_gpu_blocks_override": 50}
    replayed, _ = generated(folder, requests, **sizes)
    assert len(device.graphs.replayed) > 4
    assert launches(device.graphs.captured[0]).count("lay_out_rows") == 2
    device.most_tokens = 0
    whole, _ = generated(folder, requests, **sizes, disable_hybrid_kv_cache_manager=True)
    assert whole == replayed


def opened(folder: Path, max_num_seqs: int = 3) -> Runner:
    config = worker_config(
        folder=str(folder),
        model=read_config(folder),
        max_num_seqs=max_num_seqs,
        block_size=4,
        max_model_len=20,
        num_gpu_blocks_override=9,
    )
    return Runner(config, lambda phase, part: None)


def found(runner: Runner) -> list[Form]:
    """The forms that a runner has recorded, when all is prepared."""
    while runner.prepare():
        pass
    forms: Any = runner._compute  # pyright: ignore[reportPrivateUsage]
    known = [forms.find(rows, whole=whole, adapted=False) for whole in (True, False) for rows in (1, 2, 3)]
    return [form for form in known if form is not None]


def test_a_model_that_reads_lengths_on_the_host_runs_as_before(
    folder: Path, device: Interpreted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attend = DecoderAttention.forward

    def forward(self: DecoderAttention, *inputs: torch.Tensor) -> torch.Tensor:
        assert max(context().kv_lens_host) > 0
        return attend(self, *inputs)

    monkeypatch.setattr(DecoderAttention, "forward", forward)
    with caplog.at_level(logging.WARNING):
        runner = opened(folder)
        assert not runner.facts.has_idle_work
        assert found(runner) == []
    assert caplog.messages == [
        f"steps of {kind} are not replayed as CUDA graphs: it reads kv_lens_host"
        for kind in ("single tokens", "prompts and texts")
    ]
    runner.close()


def test_a_graph_that_does_not_fit_is_left_out(
    folder: Path, device: Interpreted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    capture = RecordedGraphs.__call__
    short = iter([True])  # at the first, the largest

    def limited(self: RecordedGraphs, work: Callable[[], Any]) -> Any:
        if next(short, False):
            raise torch.OutOfMemoryError
        return capture(self, work)

    monkeypatch.setattr(RecordedGraphs, "__call__", limited)
    with caplog.at_level(logging.WARNING):
        runner = opened(folder)
    assert runner.facts.has_idle_work
    assert found(runner) == [Form(1, True), Form(2, True), Form(1, False), Form(2, False), Form(3, False)]
    assert caplog.messages == ["no memory for a CUDA graph of 3 rows: such steps run as they are"]
    runner.close()


def test_sizes_end_with_the_largest_step() -> None:
    assert sizes_up_to(512, ROWS) == sizes_up_to(600, ROWS) == list(ROWS)
    assert sizes_up_to(20, ROWS) == [1, 2, 4, 8, 16, 20]
    assert sizes_up_to(8192, TOKENS) == list(TOKENS)
    assert sizes_up_to(512, TOKENS) == [16, 32, 64, 128, 256, 512]
    assert sizes_up_to(20, TOKENS) == [16, 20]
    assert sizes_up_to(0, ROWS) == sizes_up_to(0, TOKENS) == []


def test_graphs_take_what_their_largest_step_takes_and_a_little_for_each() -> None:
    driver = 4 << 20
    logits, layers = (256 + 64) * 90, (256 + 2 * 512) * 10
    assert graph_bytes(256, 512, per_row=90, per_token=10) == logits + layers + (2 * 15 + 2 * 6) * driver
    assert graph_bytes(1024, 512, per_row=90, per_token=10) == graph_bytes(512, 512, per_row=90, per_token=10)
    assert graph_bytes(0, 20, per_row=0, per_token=10) == 40 * 10 + 2 * driver


def test_a_row_that_is_not_finite_fails_alone_in_a_graph_of_more_rows(
    folder: Path, device: Interpreted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows in a graph of four, whose last row is nobody's."""
    device.most_tokens = 4
    healthy = DecoderForCausalLM.logits

    def broken(self: DecoderForCausalLM, hidden: torch.Tensor) -> torch.Tensor:
        """The logits; of four rows the third is not finite, and the last takes the first token."""
        logits = healthy(self, hidden)
        if len(logits) == 4:
            logits[2].fill_(torch.nan)
            logits[3, :1].fill_(1e9)
        return logits

    monkeypatch.setattr(DecoderForCausalLM, "logits", broken)
    runner = opened(folder, max_num_seqs=4)
    new = [NewSeq(slot, [5, 6, 7], 3, GREEDY) for slot in range(3)]
    runner.launch(StepInput(1, new, [SeqStep(slot, 0, 3, [slot], True) for slot in range(3)]))
    answer = runner.launch(StepInput(2, [], [SeqStep(slot, 3, 1, [], True, 1) for slot in range(3)])).result()
    assert device.graphs.replayed
    assert answer.failed == {2: NOT_FINITE}
    runner.close()
