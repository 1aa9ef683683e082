"""A worker tells how many kernels its device has compiled: once when it is ready, and with each step."""

from pathlib import Path

import pytest
from opened import open_runner
from tiny import tiny_checkpoint

from worker.devices.cpu import Cpu
from worker.protocol import NewSeq, Sampling, SeqStep, StepInput


def test_compilations_are_told_at_the_start_and_with_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint("LlamaForCausalLM", tmp_path)
    monkeypatch.setattr(Cpu, "kernel_compilations", 3)
    runner = open_runner(folder, max_num_seqs=2, block_size=4, num_gpu_blocks_override=8, max_model_len=16)
    assert runner.facts.kernel_compilations == 3
    monkeypatch.setattr(Cpu, "kernel_compilations", 4)
    new = [NewSeq(0, [5, 6], 2, Sampling(max_tokens=2))]
    output = runner.launch(StepInput(1, new, [SeqStep(0, 0, 2, [0], samples=True)])).result()
    assert output.kernel_compilations == 4
    runner.close()
