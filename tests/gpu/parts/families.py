"""A tiny model of every architecture: the card's greedy tokens in float32 beside the CPU's, and in bfloat16.

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
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
FOLDERS = (HERE.parents[2], HERE.parent, HERE.parents[1] / "support", HERE.parents[1] / "bench")
sys.path[:0] = [str(folder) for folder in FOLDERS]

from results import Result  # noqa: E402
from scheduled import Loop  # noqa: E402
from sizes import worker_config  # noqa: E402
from workbench import Part, Workbench  # noqa: E402

from engine_core.protocol import Add  # noqa: E402
from models.config import read_config  # noqa: E402
from worker.protocol import Sampling  # noqa: E402
from worker.runner import Runner  # noqa: E402

_MOST = 12
"""Processes that share the card, each with a small part of its memory."""
_SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 32}
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
    from tiny import ARCHITECTURES, tiny_checkpoint

    from worker.kernels.cuda.unsupported import Unsupported

    share, of, device = int(arguments[0]), int(arguments[1]), arguments[2]
    for name in ARCHITECTURES[share::of]:
        with TemporaryDirectory() as place:
            folder = tiny_checkpoint(name, Path(place) / "model")
            expected = _tokens(folder, "cpu", "float32")
            try:
                exact, rounded = (_tokens(folder, device, dtype) for dtype in ("float32", "bfloat16"))
            except Unsupported as error:
                result = Result(name, str(error), skipped=True)
            except Exception as error:
                result = Result(name, f"{type(error).__name__}: {error}"[:300], wrong=1)
            else:
                same = sum(a == b for a, b in zip(chain(*rounded), chain(*expected), strict=False))
                text = "the CPU's tokens" if exact == expected else "other tokens than the CPU's"
                text += f"; in bfloat16 {same} of {sum(map(len, expected))}"
                result = Result(name, text, wrong=int(exact != expected))
        print(json.dumps(asdict(result)), flush=True)
    return 0


def _tokens(folder: Path, device: str, dtype: str) -> list[list[int]]:
    """What four prompts of several lengths are continued with, each step planned one ahead."""
    config = worker_config(
        folder=str(folder), model=read_config(folder), device=device, dtype=dtype, **_SIZES
    )
    runner = Runner(config, lambda phase, part: None)
    try:
        while runner.prepare():
            pass
        dummy: Any = SimpleNamespace(
            runner=runner, facts=runner.facts, shape=SimpleNamespace(vocabulary=config.model.vocab_size)
        )
        greedy = Sampling(max_tokens=10, temperature=0)
        prompts = [[(11 * number + 7 * at) % 300 + 10 for at in range(5 + 9 * number)] for number in range(4)]
        requests = [Add(id=at, tokens=prompt, params=greedy) for at, prompt in enumerate(prompts)]
        return Loop(dummy, 1).run(requests)
    finally:
        runner.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

PARTS = (Part("families", compare_families, 280),)
