"""A tiny model of every architecture: the card's greedy tokens in float32 beside the CPU's, and in bfloat16,
or the vectors that it makes of texts in the 16 bits in which it serves files in float32.

    python tests/gpu/parts/families.py SHARE OF DEVICE

computes each OF-th architecture from SHARE on, and prints a result in JSON for each: most of the time goes
into compiling, by as many processes as there are cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch

HERE = Path(__file__).parent
FOLDERS = (HERE.parents[2], HERE.parent, HERE.parents[1] / "support", HERE.parents[1] / "bench")
sys.path[:0] = [str(folder) for folder in FOLDERS]

from results import Result  # noqa: E402
from scheduled import Loop  # noqa: E402
from sizes import worker_config  # noqa: E402
from workbench import Part, Workbench  # noqa: E402

from engine_core.protocol import Add  # noqa: E402
from models.config import read_config  # noqa: E402
from models.conversion.conversion_choice import Conversion  # noqa: E402
from worker.protocol import NewSeq, Pooling, Sampling, SeqStep, StepInput  # noqa: E402
from worker.runner import Runner  # noqa: E402

_MOST = 12
"""Processes that share the card, each with a small part of its memory."""
_LEAST_COSINE = 0.999
_SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 64}
_SIZES |= {"num_gpu_blocks_override": 64, "gpu_memory_utilization": 0.06}


def compare_families(bench: Workbench) -> Iterator[Result]:
    """All architectures that have kernels, in several processes."""
    count = min(_MOST, os.cpu_count() or 1) if bench.on_card else 1
    of = count if bench.on_card else 40
    commands = [[sys.executable, __file__, str(share), str(of), bench.target.type] for share in range(count)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    for process in running:
        printed, _ = process.communicate()
        yield from (Result(**json.loads(line)) for line in printed.splitlines() if line.startswith("{"))
        if code := process.returncode:
            yield Result("families", f"a process ended with {code}", wrong=1)


def main(arguments: Sequence[str]) -> int:
    from tiny import ARCHITECTURES, ENCODERS, tiny_checkpoint

    from worker.kernels.cuda.unsupported import Unsupported

    share, of, device = int(arguments[0]), int(arguments[1]), arguments[2]
    names = [*ARCHITECTURES, *(f"{name}Model" for name in ENCODERS)]
    for name in names[share::of]:
        with TemporaryDirectory() as place:
            folder = tiny_checkpoint(name, Path(place) / "model")
            compare = _compare_tokens if name in ARCHITECTURES else _compare_vectors
            try:
                result = compare(name, folder, device)
            except Unsupported as error:
                result = Result(name, str(error), skipped=True)
            except Exception as error:
                result = Result(name, f"{type(error).__name__}: {error}"[:300], wrong=1)
        print(json.dumps(asdict(result)), flush=True)
    return 0


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


@contextmanager
def _opened(folder: Path, device: str, dtype: str, *, pools: bool = False) -> Iterator[Runner]:
    model = read_config(folder)
    runner, convert = ("pooling", "embed") if pools else ("generate", "none")
    conversion = Conversion(runner=runner, convert=convert, architecture=model.architecture)
    files = {"folder": str(folder), "model": model, "conversion": conversion}
    sizes = {**_SIZES, "max_num_batched_tokens": 64 if pools else 32}
    opened = Runner(worker_config(**files, device=device, dtype=dtype, **sizes), lambda phase, part: None)
    try:
        while opened.prepare():
            pass
        yield opened
    finally:
        opened.close()


def _prompts() -> list[list[int]]:
    return [[(11 * number + 7 * at) % 300 + 10 for at in range(5 + 9 * number)] for number in range(4)]


def _vectors(folder: Path, device: str) -> tuple[str, torch.Tensor]:
    """The number type that a device chooses, and the vectors of four texts of several lengths."""
    with _opened(folder, device, "auto", pools=True) as runner:
        rows: list[torch.Tensor] = []
        for number, text in enumerate(_prompts()):
            new = NewSeq(0, text, len(text), Pooling(task="embed"))
            blocks = [0, 1, 2, 3] if runner.facts.causal else []
            step = SeqStep(0, 0, len(text), blocks, False, pools=True)
            output = runner.launch(StepInput(number=number + 1, new=[new], seqs=[step])).result()
            rows.append(torch.frombuffer(bytearray(output.pooled[0].data), dtype=torch.float32))
        return runner.facts.dtype, torch.stack(rows)


def _tokens(folder: Path, device: str, dtype: str) -> list[list[int]]:
    """What four prompts of several lengths are continued with, each step planned one ahead."""
    with _opened(folder, device, dtype) as runner:
        shape = SimpleNamespace(vocabulary=read_config(folder).vocab_size)
        dummy: Any = SimpleNamespace(runner=runner, facts=runner.facts, shape=shape)
        greedy = Sampling(max_tokens=10, temperature=0)
        requests = [Add(id=at, tokens=prompt, params=greedy) for at, prompt in enumerate(_prompts())]
        return Loop(dummy, 1).run(requests)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

PARTS = (Part("families", compare_families, 280),)
