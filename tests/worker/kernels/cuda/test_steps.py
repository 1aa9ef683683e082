"""A whole worker that computes with the kernels of CUDA, interpreted: its tokens are those of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from interpreted_device import ON_A_CARD, Interpreted
from sizes import worker_config
from tiny import tiny_checkpoint

from models import ops
from models.config import read_config
from worker import runner as runner_module
from worker.protocol import NewSeq, Sampling, SeqStep, StepInput
from worker.runner import Runner

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [40, 41], list(range(100, 131))]
SAMPLINGS = [
    Sampling(max_tokens=9, temperature=0),
    Sampling(max_tokens=9, temperature=0.8, top_p=0.9, seed=7),
    Sampling(max_tokens=9, temperature=1.2, top_k=20, min_p=0.01, seed=8),
]
BLOCKS = 10
"""Cache blocks of a sequence."""

pytestmark = pytest.mark.skipif(ON_A_CARD, reason="on a card, workers use its kernels anyway")


@pytest.fixture(autouse=True)
def _operations() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    yield
    ops.use({})


def tokens(folder: Path) -> list[list[int]]:
    """The tokens of three sequences that are read in chunks beside each other, and then decode."""
    config = worker_config(
        folder=str(folder),
        model=read_config(folder),
        max_num_seqs=4,
        block_size=4,
        max_model_len=BLOCKS * 4,
        num_gpu_blocks_override=3 * BLOCKS,
        cpu_threads=1,
    )
    runner = Runner(config, lambda phase, part: None)
    found: list[list[int]] = [[], [], []]
    done = [0, 0, 0]
    for number in range(1, 8):
        fresh = number == 1
        new = [
            NewSeq(slot, prompt, len(prompt), params)
            for slot, (prompt, params) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True))
        ]
        seqs: list[SeqStep] = []
        for slot, prompt in enumerate(PROMPTS):
            count = max(1, min(20, len(prompt) - done[slot]))
            blocks = list(range(slot * BLOCKS, (slot + 1) * BLOCKS)) if fresh else []
            samples = done[slot] + count >= len(prompt)
            seqs.append(SeqStep(slot, done[slot], count, blocks, samples, len(found[slot])))
            done[slot] += count
        output = runner.launch(StepInput(number, new if fresh else [], seqs)).result()
        for slot, token in enumerate(output.tokens):
            found[slot] += [token] if token >= 0 else []
    runner.close()
    return found


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "YoutuForCausalLM"])
def test_tokens_are_those_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    folder = tiny_checkpoint(architecture, tmp_path)
    expected = tokens(folder)
    assert [len(each) for each in expected] == [7, 7, 6]

    def open_device(_: object) -> Interpreted:
        device = Interpreted()
        ops.use(device.kernels)
        return device

    monkeypatch.setattr(runner_module, "open_device", open_device)
    assert tokens(folder) == expected
