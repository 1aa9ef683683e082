"""Program: steps of all kinds on torch's "meta" device, whose kernels must be listed before the first one.

Arguments are a compute capability, the name of a cache's number type, and folders of models. What would be
started is written down, not started, so steps may be as long as real ones. For each model the program prints
how many variants were needed, and then each that was needed and had not been listed.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from meta_cuda import MetaCuda, opened
from sizes import worker_config

from models.config import read_config
from models.conversion.conversion_choice import resolve_conversion
from worker import model_loading
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.compiling.model_variants import describe, model_calls
from worker.kernels.cuda.operations import cuda_operations
from worker.options import LoraOptions
from worker.protocol import NewSeq, Pooling, Sampling, SeqStep, StepInput
from worker.runner import Runner

DTYPE = torch.bfloat16
BLOCK, LONGEST, SLOTS = 64, 16384, 160
LORA = LoraOptions(enable_lora=True)
FURTHER = 5000
"""The tokens that a sequence has before a step whose keys are split."""
STEPS = (
    *([count] for count in (1, 5, 16, 17, 100, 127, 128, 200, 513, 600, 2000, 7000)),
    *([3, 1], [20, 30], [600, 1, 1], [5] * 40, [20] * 40, [1] * SLOTS),
)
"""New tokens of each row."""


def generate(runner: Runner) -> None:
    """Prompts, each followed by a token, by one after many others, and by a chunk after many others."""
    params = Sampling(max_tokens=LONGEST, temperature=0.7, top_p=0.9)
    blocks = [0] * (LONGEST // BLOCK * len(runner.facts.windows))
    number = 0
    for rows in STEPS:
        sequences = [
            NewSeq(slot, [5] * count, count, params, adapter=slot % 2) for slot, count in enumerate(rows)
        ]
        later = [min(LONGEST - 1, count + FURTHER) for count in rows]
        following = [
            (rows, rows),
            ([1] * len(rows), [count + 1 for count in rows]),
            ([1] * len(rows), later),
            ([min(count, 50) for count in rows], later),
        ]
        for turn, (counts, ends) in enumerate(following):
            number += 1
            seqs = [
                SeqStep(slot, end - count, count, [] if turn else blocks, True)
                for slot, (count, end) in enumerate(zip(counts, ends, strict=True))
            ]
            runner.launch(StepInput(number, [] if turn else sequences, seqs))


def pool(runner: Runner) -> None:
    """Texts of all lengths."""
    task: Any = next(task for task in runner.facts.tasks if task != "generate")
    params = Pooling(task=task)
    longest = runner.facts.max_model_len
    for number, rows in enumerate(STEPS):
        counts = [min(count, longest) for count in rows]
        new = [
            NewSeq(slot, [5] * count, count, params, adapter=slot % 2) for slot, count in enumerate(counts)
        ]
        blocks = [0] * (longest // BLOCK) if runner.facts.causal else []
        seqs = [SeqStep(slot, 0, count, blocks, False, pools=True) for slot, count in enumerate(counts)]
        runner.launch(StepInput(number, new, seqs))


def missing_of(folder: Path, card: Card, cache_dtype: torch.dtype) -> tuple[int, list[str]]:
    """The number of variants that steps of a model need, and those of them that are not listed."""
    model = read_config(folder)
    conversion = resolve_conversion(model, folder)
    kernels = cuda_operations(card)
    given = model, folder, DTYPE, card.capability, BLOCK, cache_dtype, kernels
    listed = model_calls(*given, lora=LORA)
    config = worker_config(
        folder=str(folder),
        model=model,
        conversion=conversion,
        load_format="dummy",
        max_num_seqs=SLOTS,
        block_size=BLOCK,
        max_model_len=min(LONGEST, model.max_len or LONGEST),
        max_num_batched_tokens=LONGEST,
        num_gpu_blocks_override=2048,
        lora=LORA,
    )
    model_loading.choose_dtypes = lambda config, device: (DTYPE, cache_dtype)
    with opened(config, MetaCuda(512, card, joins=True)) as (runner, calls):
        while runner.prepare():
            pass
        (generate if conversion.runner == "generate" else pool)(runner)
    needed = {describe(call) for call in calls}
    return len(needed), sorted(needed - {describe(call) for call in listed})


def main(capability: str, cache: str, *folders: str) -> None:
    for folder in folders:
        count, missing = missing_of(Path(folder), Card(int(capability), 132), getattr(torch, cache))
        print(count, *missing, sep="\n  ")


if __name__ == "__main__":
    main(*sys.argv[1:])
