"""The program behind `facet kernels compile`: all kernels of a model, for cards that need not be here."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path

import torch
from triton import knobs

from models.config import ModelConfig, has_latent_cache, read_config
from models.conversion.conversion_choice import resolve_conversion
from models.ops.attention_inputs import CACHE_DTYPES
from models.quantization.config import makes_fp8, read_cache_scheme
from models.weight_coding import E4M3
from worker.host.machine import usable_cores
from worker.kernels.cuda.capabilities import LEAST_E4M3, PROCESSORS, SHARED_KIB, Card, short_dtype
from worker.kernels.cuda.compiling.machine_code import faults
from worker.kernels.cuda.compiling.model_variants import (
    calls_of_ranks,
    compile_ahead,
    model_calls,
    one_of_each,
    opening_calls,
)
from worker.kernels.cuda.launch import Call
from worker.kernels.cuda.operations import cuda_operations
from worker.kernels.cuda.unsupported import Unsupported
from worker.kernels.uses import Uses
from worker.options import LoraOptions


def cache_dtype_on(config: ModelConfig, asked: str, capability: int) -> torch.dtype | None:
    """The number type of a cache that a server would choose on such a card; None for the model's own."""
    scheme = read_cache_scheme(config) if asked == "auto" and not has_latent_cache(config.raw) else None
    if scheme is not None and scheme.obstacle is None and capability >= LEAST_E4M3:
        return torch.float8_e4m3fn
    return CACHE_DTYPES.get(asked)


def _dtype_on(config: ModelConfig, given: Namespace, capability: int) -> str:
    """The name of the number type that a server would choose on such a card."""
    wanted: str = config.dtype if given.dtype == "auto" else given.dtype
    if given.dtype != "auto" or wanted != "float32":
        return wanted
    pools = resolve_conversion(config, given.folder).runner == "pooling"
    return short_dtype(config.architecture, pools=pools, capability=capability)


def all_calls(config: ModelConfig, given: Namespace, capability: int) -> list[Call]:
    """The calls of all ranks of a model, one for each variant, on any card of a compute capability.

    Whether inputs of a product are split depends on the number of multiprocessors: so those of the smallest
    and of the largest card are taken.
    """
    dtype = getattr(torch, _dtype_on(config, given, capability))
    cache_dtype = cache_dtype_on(config, given.kv_cache_dtype, capability)
    calls: list[Call] = []
    fp8 = makes_fp8(config, given.quantization)
    uses = Uses(*[(8, E4M3)] * fp8)
    lora = LoraOptions(enable_lora=given.enable_lora, max_lora_rank=given.max_lora_rank)
    for processors in PROCESSORS:
        kernels = cuda_operations(Card(capability, processors), fp8=fp8)
        calls += calls_of_ranks(
            partial(
                model_calls,
                *(config, given.folder, dtype, capability, given.block_size, cache_dtype, kernels),
                uses=uses,
                lora=lora,
            ),
            given.tensor_parallel_size,
            given.pipeline_parallel_size,
            whole_experts=given.enable_expert_parallel,
            replicas=given.data_parallel_size if given.enable_expert_parallel else 1,
            transport=given.all2all_backend,
        )
    return one_of_each([*opening_calls(capability, config.head_dim, dtype, uses), *calls])


def main(options: str) -> int:
    """Compile for `facet kernels compile`, which checks options. Returns 1 if a variant fits no card, or
    there are no kernels for a layer."""
    given = Namespace(**json.loads(options))
    given.folder = Path(given.folder)
    config = read_config(given.folder)
    too_large = False
    for capability in given.capabilities:
        started = time.monotonic()
        try:
            calls = all_calls(config, given, capability)
        except Unsupported as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        made = compile_ahead(calls, capability, threads=usable_cores())
        for number, variant in enumerate(made, start=1):
            fault = faults(variant, capability)
            too_large = too_large or variant.shared > SHARED_KIB[capability] * 1024
            name = variant.name.partition("(")[0]
            print(
                f"{capability / 10}  {number}/{len(calls)}  {name}{': ' if fault else ''}{fault}", flush=True
            )
        took = time.monotonic() - started
        print(f"{capability / 10}: {len(calls)} variants in {took:.1f} s, in {knobs.cache.dir}", flush=True)
    return int(too_large)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
