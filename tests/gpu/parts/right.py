"""Whether kernels compute what they should on this card, beside torch and the formulas."""

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draws import make_draws
from products import measure_rounding
from results import Result
from workbench import Part, Workbench

from worker.sampling.grouped_logits import BY_TORCH, GroupedLogits
from worker.sampling.top_k_top_p import Draws, draw_fully
from worker.tables.random_bits import uniform

ROOT = Path(__file__).parents[3]
_PYTEST = """\
[pytest]
pythonpath = {root} {root}/tests/support
addopts = --import-mode=importlib -p no:cacheprovider -m "not slow" --tb=short -v
markers =
    cuda: needs a CUDA device
    slow: takes more than ten seconds
"""
_AHEAD = (
    "compiling/test_model_variants.py",
    "compiling/test_machine_code.py",
    "steps/test_step_graphs.py",
    "steps/test_mixed_step.py",
    "steps/test_costs.py",
)
"""Tests that need no card: they compile ahead, or stand in for graphs and devices."""
_MOST_TOLD = 20
_TESTS_SECONDS = 65


def check_operations(bench: Workbench) -> Iterator[Result]:
    """Every operation against its reference, with memory for results that is full of NaN before."""
    from models.ops import SPECIFIED
    from worker.kernels.compare_with_reference import wrong

    few = ("rms_norm", "activation", "add")
    compared = SPECIFIED if bench.on_card else {name: SPECIFIED[name] for name in few}
    for dim in bench.some((64, 96, 128, 256)):
        with bench.poisoned():
            names = wrong(bench.operations, compared, target=bench.target, dim=dim)
        yield Result(f"operations, heads of {dim}", ", ".join(names) or "right", wrong=len(names))


def check_draws(bench: Workbench) -> Iterator[Result]:
    """Tokens drawn by the kernel and by the rule in torch, on the card and on the host."""
    _ = bench.operations
    from worker.kernels.cuda.draw_kernel import draw

    for rows, width in bench.some(((500, 4173), (64, 151_936))):
        rows, width = bench.rows(rows), bench.size(width, 300)
        logits = 3 * torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
        on_host = draw_fully(GroupedLogits(logits, BY_TORCH), _draws(rows, torch.device("cpu")))
        there = GroupedLogits(logits.to(bench.target), BY_TORCH)
        wanted = _draws(rows, bench.target)
        with bench.poisoned():
            drawn = draw(there, wanted).cpu()
        by_torch = draw_fully(there, wanted).cpu()
        for name, other in (("torch on the device", by_torch), ("the host", on_host)):
            differ = int((drawn.long() != other.long()).sum())
            # Sums in another order move a border between two tokens once in a great while.
            wrong = int(differ > rows // 100)
            text = f"{differ} of {rows} differ" if differ else "the same tokens"
            yield Result(f"{rows} draws of {width}, and those of {name}", text, wrong=wrong)


def _draws(rows: int, target: torch.device) -> Draws:
    """Draws with all kinds of filters, in turn."""
    number = np.arange(rows)
    points = uniform((number * 2 + 1).astype("uint64"), number)

    def column(*values: float) -> list[Any]:
        return [values[each % len(values)] for each in range(rows)]

    filters = column(0, 50, 0, 7, 0), column(1.0, 1.0, 0.9, 0.95), column(*[0.0] * 6, 0.05)
    return make_draws(points, column(0.7, 1.0, 1.3), *filters, target)


def check_rounded_products(bench: Workbench) -> Iterator[Result]:
    """Products whose inputs are rounded to 8 bits, beside those of 16 bits."""
    from worker.kernels.cuda.products.rounded import torch_multiplies

    if bench.card.rounds_inputs:
        told = (
            "right" if torch_multiplies(bench.card, bench.target) else "refused or wrong: inputs keep 16 bits"
        )
        yield Result("torch's own products in 8 bits", told)
    for result in measure_rounding(bench, counts=(16, 256)):
        yield Result(result.name, result.text or "the measure", wrong=result.wrong)


def run_tests(bench: Workbench) -> Iterator[Result]:
    """The tests of kernels, which the interpreter runs elsewhere."""
    import pytest  # noqa: F401  # skipped by this name, if it is missing

    ini = bench.folder / "pytest.ini"
    ini.write_text(_PYTEST.format(root=ROOT))
    folder = "tests/worker/kernels/cuda"
    chosen = [folder] if bench.on_card else [f"{folder}/test_attention_plan.py"]
    left_out = [f"--ignore={folder}/{name}" for name in _AHEAD]
    parallel = ["-n", "8"] if bench.on_card and find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "-c", str(ini), "--rootdir", str(ROOT), *chosen, *left_out]
    printed = bench.folder / "tests.log"
    with printed.open("wb") as file:
        process = subprocess.Popen([*command, *parallel], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        try:
            code = process.wait(_TESTS_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
    output = printed.read_text(errors="replace")
    print(output, flush=True)
    yield from read_unfinished(output) if code is None else read_tests(output, code)


def read_unfinished(output: str) -> Iterator[Result]:
    """What pytest has printed, with or without xdist, before its time was over."""
    alone = re.findall(r"^(\S+::.+?) FAILED", output, re.MULTILINE)
    spread = re.findall(r"^\[gw\d+\] .*?FAILED (\S+::.+?) *$", output, re.MULTILINE)
    for name in [*alone, *spread]:
        yield Result(_short(name), "failed", wrong=1)
    passed = len(re.findall(r"\bPASSED\b", output))
    yield Result("tests of kernels", f"{passed} passed before their time was over", unfinished=True)


def _short(name: str) -> str:
    """The name of a test without its folder."""
    return re.sub(r"^\S*/", "", name)


def read_tests(output: str, code: int) -> Iterator[Result]:
    """What pytest has printed: those that failed, one by one, and files that need what is not installed."""
    failed = re.findall(r"^FAILED (.+?)(?: - (.*))?$", output, re.MULTILINE)
    for name, reason in failed[:_MOST_TOLD]:
        yield Result(_short(name), reason or "failed", wrong=1)
    if others := failed[_MOST_TOLD:]:
        yield Result("other tests of kernels", f"{len(others)} failed", wrong=len(others))
    missing = sorted(set(re.findall(r"No module named '([\w.]+)'", output)))
    broken = re.findall(r"^ERROR (\S+)", output, re.MULTILINE)
    last = (output.strip().splitlines() or ["pytest said nothing"])[-1].strip("= ")
    if broken and missing and not failed:
        yield Result("tests of kernels", f"{last}: there is no {', '.join(missing)} here", skipped=True)
    else:
        yield Result("tests of kernels", last, wrong=int(code != 0 and not failed))


PARTS = (
    Part("operations", check_operations, 60),
    Part("draws", check_draws, 30),
    Part("products of rounded inputs", check_rounded_products, 30),
    Part("tests of kernels", run_tests, _TESTS_SECONDS + 5),
)
