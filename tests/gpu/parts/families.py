"""A tiny model of every architecture: the card's greedy tokens in float32 beside the CPU's, and in bfloat16,
or the vectors that it makes of texts in the 16 bits in which it serves files in float32.
"""

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from beside_cpu import answers, compare_all, opened
from results import Result
from workbench import Part, Workbench

from engine_core.protocol import AddRequest
from worker.protocol import NewSeq, Pooling, Sampling, SeqStep, StepInput

_MOST, _FEW = 12, 40
"""Processes that share the card; without one, each fortieth architecture is compared."""
_LEAST_COSINE = 0.999


def compare_families(bench: Workbench) -> Iterator[Result]:
    """All architectures that have kernels, in several processes."""
    from tiny import ARCHITECTURES, ENCODERS

    names = [*ARCHITECTURES, *(f"{name}Model" for name in ENCODERS)]
    count = min(_MOST, os.cpu_count() or 1)
    groups = [names[share::count] for share in range(count)] if bench.on_card else [names[::_FEW]]
    yield from compare_all(bench, "families", groups)


def compare(name: str, place: Path, device: str) -> Result:
    from tiny import ARCHITECTURES, tiny_checkpoint

    folder = tiny_checkpoint(name, place / "model")
    return (_compare_tokens if name in ARCHITECTURES else _compare_vectors)(name, folder, device)


def _compare_tokens(name: str, folder: Path, device: str) -> Result:
    expected = _tokens(folder, "cpu", "float32")
    exact, rounded = (_tokens(folder, device, dtype) for dtype in ("float32", "bfloat16"))
    same = sum(a == b for a, b in zip(chain(*rounded), chain(*expected), strict=False))
    text = "the CPU's tokens" if exact == expected else "other tokens than the CPU's"
    text += f"; in bfloat16 {same} of {sum(map(len, expected))}"
    return Result(name, text, wrong=int(exact != expected))


def _compare_vectors(name: str, folder: Path, device: str) -> Result:
    expected, (dtype, ours) = _vectors(folder, "cpu")[1], _vectors(folder, device)
    least = float(torch.nn.functional.cosine_similarity(ours, expected).min())
    return Result(name, f"in {dtype} cosines from {least:.5f}", wrong=int(not least > _LEAST_COSINE))


def _prompts() -> list[list[int]]:
    return [[(11 * number + 7 * at) % 300 + 10 for at in range(5 + 9 * number)] for number in range(4)]


def _vectors(folder: Path, device: str) -> tuple[str, torch.Tensor]:
    """The number type that a device chooses, and the vectors of four texts of several lengths."""
    with opened(folder, device, pools=True, max_num_seqs=4) as runner:
        rows: list[torch.Tensor] = []
        for number, text in enumerate(_prompts()):
            new = NewSeq(0, text, len(text), Pooling(task="embed"))
            blocks = [0, 1, 2, 3] if runner.facts.causal else []
            step = SeqStep(0, 0, len(text), blocks, False, pools=True)
            output = runner.launch(StepInput(number=number + 1, new=[new], seqs=[step])).result()
            rows.append(torch.frombuffer(bytearray(output.pooled[0].data), dtype=torch.float32))
        return runner.facts.dtype, torch.stack(rows)


def _tokens(folder: Path, device: str, dtype: str) -> list[list[int]]:
    """What four prompts of several lengths, which do not all fit in a step, are continued with."""
    with opened(folder, device, dtype=dtype, max_num_seqs=4, max_num_batched_tokens=32) as runner:
        greedy = Sampling(max_tokens=10, temperature=0)
        requests = [AddRequest(id=at, tokens=prompt, params=greedy) for at, prompt in enumerate(_prompts())]
        return answers(folder, runner, requests)[0]


PARTS = (Part("families", compare_families, 280),)
