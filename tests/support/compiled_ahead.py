"""Compiles what models start on cards of one capability, in a process in which nothing is interpreted.

Arguments: the capability, the number of a share and how many shares there are, and in JSON a list of models:
the folder, the number types of its cache, and whether it is served in fp8. A line of JSON comes out for each
variant: the kernel and its constants, and for those of this share, which are compiled, their kinds of
instructions of the matrix unit, and what is wrong with them.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from machine_code import compile_ahead, faults

from models.config import read_config
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.compiling.model_variants import model_calls, one_of_each
from worker.kernels.cuda.launch import KernelLaunch
from worker.kernels.cuda.operations import cuda_operations
from worker.options import LoraOptions

PROCESSORS = 132
LORA = LoraOptions(enable_lora=True)


def calls_of(capability: int, folder: Path, caches: Sequence[str], *, fp8: bool) -> list[KernelLaunch]:
    """What a model starts; one in fp8, where torch's products of 8 bits are right, and where they are not."""
    config, types = read_config(folder), [getattr(torch, cache) for cache in caches]
    given = (config, folder, torch.bfloat16, capability)
    cards = [Card(capability, PROCESSORS, scaled_mm=right) for right in ((True, False) if fp8 else (True,))]
    operations = [cuda_operations(card, fp8=fp8) for card in cards]
    return [
        call
        for each in types
        for kernels in operations
        for call in model_calls(*given, cache_dtype=each, kernels=kernels, lora=LORA)
    ]


def main(capability: int, share: int, shares: int, models: Sequence[tuple[str, list[str], bool]]) -> None:
    calls = one_of_each(
        call for folder, caches, fp8 in models for call in calls_of(capability, Path(folder), caches, fp8=fp8)
    )
    compiled = compile_ahead(calls[share::shares], capability, os.cpu_count() or 1)
    for number, call in enumerate(calls):
        given = zip(call.kernel.params, call.arguments, strict=True)
        constants = {parameter.name: value for parameter, value in given if parameter.is_constexpr}
        made = next(compiled) if number % shares == share else None
        found = (None, "") if made is None else (made.matrix_unit, faults(made, capability))
        print(json.dumps((call.kernel.fn.__name__, constants, *found)), flush=True)


if __name__ == "__main__":
    capability, share, shares = map(int, sys.argv[1:4])
    main(capability, share, shares, json.loads(sys.argv[4]))
