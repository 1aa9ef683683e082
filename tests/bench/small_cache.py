"""What a cache of 8 bits gains beside one of bfloat16: attention alone, and whole steps of a model; a table.

    PYTHONPATH=.:tests/support python tests/bench/small_cache.py [MODEL] [--rows 1 8 32] [--one-thread]

Both caches take turns in one process, so a machine that is busy for a while slows both down; the ratio is the
median of those of neighbours in time. Layers of attention hold more bytes together than processors cache.
With MODEL, a folder of which config.json alone is read, weights and caches are random numbers.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from paged import make_step
from torch import Tensor

from models.config import read_config
from models.context import ForwardContext
from models.conversion.conversion_choice import Conversion
from models.ops.attention_inputs import CODES, rounded, stored_shape
from worker.config import WorkerConfig
from worker.host.memory import huge_pages
from worker.kernels.cpu.operations import open_kernels
from worker.options import WorkerOptions
from worker.protocol import NewSeq, Sampling, SeqStep, StepInput
from worker.runner import Runner

_HEADS, _KV_HEADS, _DIM, _BLOCK = 16, 8, 128, 32
_BYTES = 400 << 20
_CACHES = {"bfloat16": torch.bfloat16, "int8": CODES}
_SHAPES = (([1], 1024), ([1], 16384), ([1] * 8, 1024), ([1] * 32, 1024), ([9], 4096), ([1024], 1024))
"""New tokens of each row, and all tokens of one."""


def print_row(title: str, works: Sequence[Callable[[], object]], given: argparse.Namespace) -> None:
    """Time two works in turns, and print a row of a table in milliseconds."""
    clock = time.process_time if given.one_thread else time.perf_counter

    def seconds(work: Callable[[], object]) -> float:
        started = clock()
        work()
        return clock() - started

    for work in works:
        work()
    found = [[seconds(work) * 1e3 for work in works] for _ in range(given.turns)]
    least = " | ".join(f"{min(each):.2f}" for each in zip(*found, strict=True))
    print(f"| {title} | {least} | {statistics.median(a / b for a, b in found):.2f} |", flush=True)


def attention_work(table: Any, step: ForwardContext, dtype: torch.dtype) -> Callable[[], object]:
    """Attention of one layer, which is another one each time."""
    row = stored_shape((2, step.block_table.numel(), _KV_HEADS, _BLOCK, _DIM), dtype)
    count = max(1, _BYTES // (torch.Size(row).numel() * dtype.itemsize))
    filled = rounded(torch.randn(*row[:-1], _DIM), dtype)
    caches: list[Tensor] = []
    for _ in range(count):
        caches.append(huge_pages(filled.nbytes).view(dtype).view(row).copy_(filled))
    q = torch.randn(len(step.positions), _HEADS, _DIM).bfloat16()
    turn = [0]

    def attend() -> None:
        turn[0] += 1
        table["attention"](q, caches[turn[0] % count], step, scale=_DIM**-0.5)

    return attend


def open_runner(cache: str, given: argparse.Namespace) -> Runner:
    folder, rows, context = given.model, max(given.rows), given.context
    model = read_config(Path(folder))
    served_as = Conversion(runner="generate", convert="none", architecture=model.architecture)
    sizes: dict[str, Any] = {"max_num_seqs": rows, "block_size": _BLOCK, "max_model_len": context + 64}
    options = WorkerOptions(
        load_format="dummy",
        quantization=given.quantization,
        device="cpu",
        cpu_threads=1 if given.one_thread else None,
        dtype="bfloat16",
        kv_cache_dtype=cache,
        **sizes,
    )
    config = WorkerConfig(
        folder=folder, model=model, conversion=served_as, options=options, tasks=("generate",)
    )
    runner = Runner(config, lambda phase, fraction: None)
    for layer in runner._model.attention_layers():  # pyright: ignore[reportPrivateUsage]
        for part in layer.cache_parts():
            for block in part:
                block.copy_(rounded(torch.randn(_KV_HEADS, _BLOCK, _DIM), _CACHES[cache]))
    return runner


def step_work(runner: Runner, rows: int, context: int) -> Callable[[], object]:
    """A step in which so many sequences decode behind so many tokens, after one that gives them blocks."""
    blocks = -(-(context + 1) // _BLOCK)
    new = [
        NewSeq(slot, [5] * (context + 1), context, Sampling(max_tokens=64, temperature=0))
        for slot in range(rows)
    ]
    first = [
        SeqStep(slot, context, 1, [*range(slot * blocks, (slot + 1) * blocks)], True, 1)
        for slot in range(rows)
    ]
    runner.launch(StepInput(1, new, first)).result()
    step = StepInput(2, [], [SeqStep(slot, context, 1, [], True, 1) for slot in range(rows)])
    return lambda: runner.launch(step).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=15)
    about = "measure the processor's time of one thread, which other programs hardly change"
    parser.add_argument("--one-thread", action="store_true", help=about)
    parser.add_argument("--quantization", choices=["int8", "int8-dynamic", "int4"])
    given = parser.parse_args()
    print(f"| | {', ms | '.join(_CACHES)}, ms | times as fast |\n|---|---:|---:|---:|")
    if given.model is None:
        table = open_kernels(1 if given.one_thread else 2)
        for new, total in _SHAPES:
            step = make_step(new, [total] * len(new), _BLOCK)
            works = [attention_work(table, step, dtype) for dtype in _CACHES.values()]
            print_row(f"{len(new)} x {new[0]} tokens of {total}", works, given)
        return
    runners = [open_runner(each, given) for each in _CACHES]
    for rows in given.rows:
        works = [step_work(runner, rows, given.context) for runner in runners]
        print_row(f"{rows} rows of {given.context} tokens", works, given)


if __name__ == "__main__":
    main()
