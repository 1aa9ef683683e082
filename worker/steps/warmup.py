"""The first steps a worker takes: real ones, in the slot and the cache block that no sequence uses."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import cast

from msgspec.structs import replace

from worker.protocol import NewSeq, Pooling, Sampling, SeqStep, StepInput, StepOutput, Task
from worker.tasks import samples
from worker.worker_facts import TimedSteps, WorkerFacts

TOKENS = 16

Complete = Callable[[list[StepInput]], list[StepInput]]
"""The type of a function that completes the first steps."""


def warm_up_steps(facts: WorkerFacts, slot: int) -> list[StepInput]:
    """A prefill, a decode and a text to be pooled, as far as they are offered."""
    steps: list[StepInput] = []
    if samples(facts.tasks):
        length = min(TOKENS, facts.max_model_len - 1)
        prefill = _first_step(facts, slot, length, length + 1, Sampling(max_tokens=2, top_p=0.9))
        decode = SeqStep(slot=slot, start=length, count=1, blocks=[], samples=True, output_index=1)
        steps += [prefill, StepInput(number=0, new=[], seqs=[decode])]
    pooling = [task for task in facts.tasks if not samples([task])]
    if pooling:
        length = min(TOKENS, facts.max_model_len)
        params = Pooling(task=cast("Task", pooling[0]))
        if params.task == "ner":  # a label, and a word
            params = replace(params, spans=((0, 1), (length - 1, length)), labels=1)
        steps.append(_first_step(facts, slot, length, length, params))
    return steps


def _first_step(
    facts: WorkerFacts, slot: int, length: int, positions: int, params: Sampling | Pooling
) -> StepInput:
    """The step of a new sequence, which gets the scratch block, as often as so many positions need in
    each group of layers."""
    new = NewSeq(slot=slot, tokens=[0] * length, prompt_len=length, params=params)
    each = -(-positions // facts.block_size) if facts.causal else 0
    blocks = [facts.num_blocks] * (each * len(facts.windows))
    pools = isinstance(params, Pooling)
    seq = SeqStep(slot=slot, start=0, count=length, blocks=blocks, samples=not pools, pools=pools)
    return StepInput(number=0, new=[new], seqs=[seq])


def warm_up(
    facts: WorkerFacts, slot: int, complete: Sequence[Complete], take: Callable[[StepInput], StepOutput]
) -> TimedSteps:
    """Take the first steps, which features complete -> tokens and seconds of each."""
    steps = warm_up_steps(facts, slot)
    for each in complete:
        steps = each(steps)
    return take_first_steps(steps, take, facts.dtype)


def take_first_steps(
    steps: Sequence[StepInput], take: Callable[[StepInput], StepOutput], dtype: str
) -> TimedSteps:
    """Take steps -> tokens and seconds of each. Raises ValueError if results are not finite."""
    timed: list[tuple[int, float]] = []
    for step in steps:
        started = time.monotonic()
        for reason in take(step).failed.values():
            raise ValueError(
                f"at warm-up {reason}, though all weights are finite: --dtype {dtype} is too narrow for "
                "them, or a number in config.json is wrong"
            )
        timed.append((sum(row.tokens for row in step.seqs), time.monotonic() - started))
    return tuple(timed)
