"""Measures the rates at which this machine reads memory and multiplies, at best.

python tests/bench/machine.py
"""

import ctypes
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

_RUNS = 15
_TIMES = 1_000_000
_SETS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")


def best_seconds(work: Callable[[], object]) -> float:
    """The shortest time of many runs: other work only makes runs longer."""
    times: list[float] = []
    for _ in range(_RUNS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def read_rate() -> float:
    """Rate of reading memory, in GB/s."""
    data = torch.ones(1 << 27)  # 512 MiB, beyond any cache
    return data.nbytes / best_seconds(data.sum) / 1e9


def matrix_rate(dtype: torch.dtype) -> float:
    """Rate of torch's products in TFLOP/s, at the size that suits it best."""
    rates: list[float] = []
    for size in (1024, 2048):
        a, b = torch.randn(2, size, size, dtype=torch.float32).to(dtype)
        rates.append(2 * size**3 / best_seconds(lambda a=a, b=b: a @ b) / 1e12)
    return max(rates)


def register_rate(name: str) -> float:
    """Rate in TFLOP/s of a function in `peak.c`, on all cores; 0 without a compiler."""
    cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(cores) as threads:
        library = Path(folder) / "peak.so"
        source = Path(__file__).with_name("peak.c")
        build = ["cc", "-O2", "-march=native", "-shared", "-fPIC", "-o", str(library), str(source)]
        try:
            subprocess.run(build, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return 0.0
        function = ctypes.CDLL(str(library))[name]  # which lets go of the interpreter
        function.restype, function.argtypes = ctypes.c_long, [ctypes.c_long]
        operations = cores * function(_TIMES)
        return operations / best_seconds(lambda: list(threads.map(function, [_TIMES] * cores))) / 1e12


def processor() -> dict[str, Any]:
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    about = {name.strip(): value.strip() for name, _, value in reversed(lines)}
    known = about.get("flags", "").split()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": about.get("model name", "unknown"),
        "cores": os.cpu_count(),
        "instructions": [name for name in _SETS if name in known],
        "memory_gib": round(memory / (1 << 30)),
    }


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    about = processor()
    # Where there are units for matrices, which `peak.c` leaves alone, torch multiplies faster; without
    # instructions for bfloat16 it takes minutes.
    by_torch = [matrix_rate(torch.bfloat16)] if "avx512_bf16" in about["instructions"] else []
    figures = {
        **about,
        "read_gb_s": read_rate(),
        "bf16_tflop_s": max([register_rate("bf16"), *by_torch]),
        "fp32_tflop_s": max(register_rate("fp32"), matrix_rate(torch.float32)),
    }
    print(json.dumps(figures))
