"""All kernels of two models and of hybrids: how long their compilation takes, their faults, and the cache."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from results import Result
from shapes import HYBRIDS, write_hybrid
from workbench import BF16, Part, Workbench

from models.config import read_config


def compile_all(bench: Workbench) -> Iterator[Result]:
    """Compile every variant and look at what came out."""
    yield from _compile(bench, again=False)


def compile_again(bench: Workbench) -> Iterator[Result]:
    """Find them in the cache, in another process."""
    yield from _compile(bench, again=True)


def _compile(bench: Workbench, *, again: bool) -> Iterator[Result]:
    from machine_code import compile_ahead, faults

    from worker.kernels.cuda.compiling.model_variants import describe, model_calls
    from worker.kernels.cuda.launch import compilations, count_compilations

    capability = _capability(bench)
    calls = {}
    with TemporaryDirectory(dir=bench.folder) as folder:
        for name in ("0.6B", "8B"):
            at = bench.shape(name).write(Path(folder) / name)
            made = model_calls(read_config(at), at, BF16, capability)
            calls |= {describe(call): call for call in made}
        for name in HYBRIDS:
            at = write_hybrid(Path(folder) / name, name, bench.shape("0.6B"))
            made = model_calls(read_config(at), at, BF16, capability)
            calls |= {describe(call): call for call in made}
    chosen = list(calls.values())[: bench.size(len(calls), 1)]
    count_compilations()
    began = time.perf_counter()
    found = list(compile_ahead(chosen, capability, threads=os.cpu_count() or 1))
    took, fresh = time.perf_counter() - began, compilations()
    name = "all kernels of these models"
    if again:
        text = f"{len(found) - fresh} of {len(found)} found in the cache"
        yield Result(f"{name}, again", text, took, "s", wrong=int(fresh > 0))
        return
    yield Result(name, f"{fresh} of {len(found)} compiled", took, "s")
    for variant in found:
        if fault := faults(variant, capability):
            yield Result(variant.name.partition("(")[0], f"{fault}: {variant.name}", wrong=1)
    spills = sum(variant.spills for variant in found)
    yield Result("registers that are spilled", str(spills) if spills else "none")


def _capability(bench: Workbench) -> int:
    """The card's, or that of an H200. No kernel is interpreted here, so `bench.card` is not asked."""
    if not bench.on_card:
        return 90
    major, minor = torch.cuda.get_device_capability(bench.target)
    return 10 * major + minor


PARTS = (
    Part("compiling", compile_all, 55),
    Part("compiling again", compile_again, 20, fresh=True),
)
