"""Compiles what models start on cards of one capability, in a process in which nothing is interpreted.

Arguments: the capability, and in JSON a list of models: the folder, the number types of its cache, and
whether it is served in fp8. A line of JSON comes out for each variant: the kernel, its constants, its kinds
of instructions of the matrix unit, and what is wrong with it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from models.config import read_config
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.compiling.machine_code import faults
from worker.kernels.cuda.compiling.model_variants import compile_ahead, model_calls, one_of_each
from worker.kernels.cuda.launch import Call
from worker.kernels.cuda.operations import cuda_operations

PROCESSORS = 132


def calls_of(capability: int, folder: Path, caches: Sequence[str], *, fp8: bool) -> list[Call]:
    """What a model starts where torch's own products of 8 bits are refused, so that ours are needed."""
    operations = cuda_operations(Card(capability, PROCESSORS, scaled_mm=False), fp8=fp8)
    config, types = read_config(folder), [getattr(torch, cache) for cache in caches]
    given = (config, folder, torch.bfloat16, capability)
    return [call for each in types for call in model_calls(*given, cache_dtype=each, kernels=operations)]


def main(capability: int, models: Sequence[tuple[str, list[str], bool]]) -> None:
    calls = one_of_each(
        call for folder, caches, fp8 in models for call in calls_of(capability, Path(folder), caches, fp8=fp8)
    )
    for call, made in zip(calls, compile_ahead(calls, capability, os.cpu_count() or 1), strict=True):
        given = zip(call.kernel.params, call.arguments, strict=True)
        constants = {parameter.name: value for parameter, value in given if parameter.is_constexpr}
        found = call.kernel.fn.__name__, constants, made.matrix_unit, faults(made, capability)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
