"""How long a checkpoint takes to load, and how much memory: beside reading its files, and beside its weights.

    python tests/bench/random_codes.py gptq llama-7.5b FOLDER
    python tests/bench/loading.py FOLDER [OTHER...]

Each is a folder, or a GGUF file. Files are read once ahead, so that they come out of the system's memory.
Each load is a process of its own, which ends before the next begins. What remains of memory when the weights
are taken off is what any model needs: compare with a plain checkpoint of the same shape.
"""

import gc
import json
import re
import subprocess
import sys
import time
from pathlib import Path

_GIB = 1 << 30
_CACHE = 256 << 20
"""Bytes of a KV cache, which are none until it is used."""


def read_files(folder: Path) -> tuple[int, float]:
    """Read all weights, as fast as one thread can; returns their bytes and the seconds."""
    buffer, total, started = bytearray(16 << 20), 0, time.monotonic()
    for path in [folder] if folder.is_file() else folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total, time.monotonic() - started


def measure(folder: Path) -> dict[str, float]:
    """Load the model in this process, as a server does."""
    from torch import nn

    from facet import LLM

    before = _memory()["VmRSS"]
    started = time.monotonic()
    llm = LLM(str(folder), dtype="bfloat16", kv_cache_memory_bytes=_CACHE, max_model_len=256)
    seconds, memory = time.monotonic() - started, _memory()
    gc.collect()  # parameters that only wait to be freed are no weights
    weights = {id(x): x.nbytes for x in gc.get_objects() if isinstance(x, nn.Parameter)}
    assert llm.facts
    return {
        "seconds": seconds,
        "weights": sum(weights.values()),
        "before": before,
        "peak": memory["VmHWM"],
        "resident": memory["VmRSS"],
    }


def _memory() -> dict[str, int]:
    """The lines of this process's status that count bytes."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return {name: int(kilobytes) << 10 for name, kilobytes in lines}


def main(folders: list[Path]) -> None:
    print("| | files, GiB | read, s | ready, s | weights, GiB | beside, at most | beside, when ready |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for folder in folders:
        read_files(folder)
        size, seconds = read_files(folder)
        command = [sys.executable, __file__, "--here", str(folder)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found = json.loads(output.splitlines()[-1])
        most, rest = (found[name] - found["weights"] for name in ("peak", "resident"))
        shares = [f"{of / _GIB:.2f} ({of / found['weights']:.1%})" for of in (most, rest)]
        print(
            f"| {folder.name} | {size / _GIB:.2f} | {seconds:.1f} | {found['seconds']:.1f} "
            f"| {found['weights'] / _GIB:.2f} | {' | '.join(shares)} |",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1] == "--here":
        print(json.dumps(measure(Path(sys.argv[2]))))
    else:
        main([Path(each) for each in sys.argv[1:]])
