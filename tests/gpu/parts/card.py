"""The card, and what it can do at most: the floors of all else."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from results import Result
from torch.nn.functional import ScalingType, scaled_mm
from workbench import Part, Workbench

_PACKAGES = ("torch", "triton", "numpy", "msgspec", "safetensors")
_OPTIONAL = ("zmq", "fastapi", "uvicorn", "tokenizers", "transformers", "pytest", "xdist")
_ASKED = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")


def say_what_is_here(bench: Workbench) -> Iterator[Result]:
    """The name of the card, and the versions of all that it works with."""
    facts = {"card": "CPU, tiny sizes"}
    if bench.on_card:
        found = torch.cuda.get_device_properties(bench.target)
        facts["card"] = found.name
        memory = f"{found.total_memory / (1 << 30):.0f} GiB"
        what = (
            f"capability {found.major}.{found.minor}, {found.multi_processor_count} multiprocessors, {memory}"
        )
        yield Result("card", f"{found.name}, {what}")
        facts["CUDA"] = str(torch.version.cuda)
    for name, value in _ask_driver().items():
        yield Result(name, value)
        if name == "driver_version":
            facts["driver"] = value
    facts |= {"Python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}
    for name, value in facts.items():
        bench.tell(fact=name, value=value)
    yield Result("versions", ", ".join(f"{name} {value}" for name, value in facts.items() if name != "card"))
    missing = [name for name in _OPTIONAL if find_spec(name) is None]
    yield Result("not installed", ", ".join(missing) or "nothing that sections ask for")


def _ask_driver() -> dict[str, str]:
    """What nvidia-smi says of the first card; nothing where it is not."""
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [value.strip() for value in run.stdout.strip().split(",")]
    return dict(zip(_ASKED, values, strict=True)) if len(values) == len(_ASKED) else {}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def measure_ceilings(bench: Workbench) -> Iterator[Result]:
    """The rates of memory and of the matrix unit, which are the floors of all else."""
    found = bench.ceilings
    yield Result("copy", "", found.bytes_per_second / 1e12, "TB/s")
    yield Result("products in bfloat16", "", found.operations_per_second / 1e12, "TFLOP/s")


def measure_fp8(bench: Workbench) -> Iterator[Result]:
    """Products of numbers of 8 bits, with a scale for each row."""
    if bench.on_card and not bench.card.rounds_inputs:
        yield Result("products in e4m3", "needs compute capability 8.9", skipped=True)
        return
    side = bench.size(8192, 16)
    x, matrix = (bench.random(side, side).to(torch.float8_e4m3fn) for _ in range(2))
    ones = torch.ones(side, 1, device=bench.target)
    rows = ScalingType.RowWise

    def multiply() -> torch.Tensor:
        return scaled_mm(x, matrix.t(), ones, rows, ones.t(), rows, output_dtype=torch.bfloat16)

    yield Result("products in e4m3, by torch", "", 2 * side**3 / bench.seconds_of(multiply) / 1e12, "TFLOP/s")


def measure_skinny_products(bench: Workbench) -> Iterator[Result]:
    """Products of few rows, which take as long as reading the matrix, at the least."""
    side = bench.size(8192, 16)
    matrix = bench.random(side, side)
    for rows in (1, 8, 16, 64, 256):
        x = bench.random(bench.rows(rows), side)
        took = bench.seconds_of(lambda x=x: torch.nn.functional.linear(x, matrix))
        floor = bench.floor(matrix.nbytes, 2 * len(x) * side**2)
        rate = matrix.nbytes / took / 1e12
        yield Result(f"product of {rows} rows", "", rate, "TB/s of the matrix", floor / took)


PARTS = (
    Part("what is here", say_what_is_here, 25),
    Part("ceilings", measure_ceilings, 15),
    Part("products in 8 bits", measure_fp8, 15),
    Part("skinny products", measure_skinny_products, 15),
)
