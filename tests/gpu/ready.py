"""How long a worker takes from the start of its process until it is ready, and with what.

    python tests/gpu/ready.py FOLDER DEVICE

prints the seconds of each part as JSON. A checkpoint is read that was written just before, so that its pages
are in memory.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BEGAN = time.monotonic()
_MARK = "ready: "
_SPARE = 1.1
"""The room for a checkpoint, as a multiple of its size."""

if TYPE_CHECKING:
    from results import Result
    from workbench import Workbench


def measure_ready(bench: Workbench, name: str) -> Iterator[Result]:
    """The parts of the time to ready, with nothing in the cache of kernels and with all of them."""
    from results import Result

    shape = bench.shape(name)
    with TemporaryDirectory(dir=bench.folder) as place:
        needed, free = 2 * (shape.body + 2 * shape.head) * _SPARE, shutil.disk_usage(place).free
        if needed > free:
            what = f"its checkpoint needs {needed / 1e9:.0f} GB of disk, and there are {free / 1e9:.0f}"
            yield Result(f"{name} ready", what, skipped=True)
            return
        folder = shape.write(Path(place) / "model")
        nbytes = shape.write_weights(folder, bench.target)
        bench.give_memory_back()
        cache = {"TRITON_CACHE_DIR": str(Path(place) / "kernels")}
        for kernels in bench.some(("not compiled", "compiled")):
            command = [sys.executable, str(HERE / "ready.py"), str(folder), bench.target.type]
            run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **cache})
            lines = [line for line in run.stdout.splitlines() if line.startswith(_MARK)]
            print(run.stderr, flush=True)
            if not lines:
                yield Result(f"{name} ready, kernels {kernels}", run.stderr.strip()[-400:], wrong=1)
                return
            parts: dict[str, Any] = json.loads(lines[0].removeprefix(_MARK))
            seconds = {part: value for part, value in parts.items() if part != "kernels"}
            text = ", ".join(f"{part} {value:.1f}" for part, value in seconds.items())
            text += f"; {parts['kernels']} kernels compiled"
            yield Result(f"{name} ready, kernels {kernels}", text, sum(seconds.values()), "s")
            yield Result(
                f"{name} weights read, kernels {kernels}", "", nbytes / parts["weights"] / 1e9, "GB/s"
            )


def main(arguments: Sequence[str]) -> int:
    folder, device = arguments
    sys.path[:0] = [str(ROOT), str(HERE), str(ROOT / "tests" / "support")]
    from sizes import worker_config

    import worker.runner
    from models.config import read_config

    at = [time.monotonic()]
    names, seen = ["import"], set[str]()

    def report(phase: str, part: float) -> None:
        if phase not in seen:
            seen.add(phase)
            at.append(time.monotonic())
            names.append({"weights": "device", "cache": "weights", "warmup": "cache"}[phase])

    config = worker_config(
        folder=folder,
        model=read_config(Path(folder)),
        device=device,
        **(
            {}
            if device == "cuda"
            else {"num_gpu_blocks_override": 64, "max_model_len": 64, "max_num_seqs": 2}
        ),
    )
    runner = worker.runner.Runner(config, report)
    at.append(time.monotonic())
    names.append("first steps and graphs")
    ends = zip(names, [BEGAN, *at[:-1]], at, strict=True)
    parts = dict[str, float]()
    for name, before, after in ends:
        parts[name] = parts.get(name, 0.0) + after - before
    parts["kernels"] = runner.facts.kernel_compilations
    print(_MARK + json.dumps(parts), flush=True)
    runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
