"""Compares what a card computes of tiny models with what the CPU does, in several processes at once.

    python tests/gpu/beside_cpu.py SECTION DEVICE CASE ...

prints a result in JSON for each case, which `compare` of the section's module makes. Most of the time goes
into compiling, so there are as many processes as cores, or as cases.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).parent
FOLDERS = (HERE.parents[1], HERE, HERE.parent / "support", HERE.parent / "bench")
sys.path[:0] = [str(folder) for folder in FOLDERS]

from results import Result  # noqa: E402
from scheduled import Loop  # noqa: E402
from sizes import worker_config  # noqa: E402
from workbench import Workbench  # noqa: E402

from engine_core.features.speculation.drafts import Drafts  # noqa: E402
from engine_core.protocol import AddRequest  # noqa: E402
from models.config import read_config  # noqa: E402
from models.conversion.conversion_choice import Conversion  # noqa: E402
from worker.runner import Runner  # noqa: E402

_SIZES = {"max_num_seqs": 6, "max_model_len": 64, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 64}
_SHARE = 0.06
"""The part of a card's memory that each of several processes takes."""


def compare_all(bench: Workbench, section: str, groups: Sequence[Sequence[str]]) -> Iterator[Result]:
    """Compare all cases, each group of them in a process of its own."""
    program = [sys.executable, __file__, section, bench.target.type]
    running = [subprocess.Popen([*program, *cases], stdout=subprocess.PIPE, text=True) for cases in groups]
    for process, cases in zip(running, groups, strict=True):
        printed, _ = process.communicate()
        yield from (Result(**json.loads(line)) for line in printed.splitlines() if line.startswith("{"))
        if code := process.returncode:
            yield Result(section, f"the process of {cases[0]} ended with {code}", wrong=1)


@contextmanager
def opened(folder: Path, device: str, *, pools: bool = False, **given: Any) -> Iterator[Runner]:
    """A worker with all its graphs, until the end of the block."""
    model = read_config(folder)
    runner, convert = ("pooling", "embed") if pools else ("generate", "none")
    fields = {
        "conversion": Conversion(runner=runner, convert=convert, architecture=model.architecture),
        "gpu_memory_utilization": _SHARE if device == "cuda" else None,
        **_SIZES,
        **given,
    }
    config = worker_config(folder=str(folder), model=model, device=device, **fields)
    worker = Runner(config, lambda phase, part: None)
    try:
        while worker.prepare():
            pass
        yield worker
    finally:
        worker.close()


def answers(
    folder: Path, runner: Runner, requests: list[AddRequest], **asked: Any
) -> tuple[list[list[int]], Any]:
    """The tokens of each request, each step planned one ahead, and what drafts have come of it."""
    loop = Loop(runner.launch, runner.facts, read_config(folder).vocab_size, **asked)
    return loop.run(requests), loop.scheduler.hooks.find(Drafts)


def compared(name: str, found: object, expected: object, more: str = "") -> Result:
    text = "as on the CPU" if found == expected else "not as on the CPU"
    return Result(name, f"{text}{more}", wrong=int(found != expected))


def main(section: str, device: str, *cases: str) -> None:
    from worker.kernels.cuda.compiling.model_variants import Unsupported

    compare = import_module(f"parts.{section}").compare
    for case in cases:
        with TemporaryDirectory() as place:
            try:
                result = compare(case, Path(place), device)
            except Unsupported as error:
                result = Result(case, str(error), skipped=True)
            except Exception as error:
                result = Result(case, f"{type(error).__name__}: {error}"[:300], wrong=1)
        print(json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
