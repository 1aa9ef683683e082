"""The first steps a worker takes, in the row and the cache block that no sequence uses. Real ones."""

from __future__ import annotations

from typing import cast

from worker.protocol import NewSeq, Pooling, Sampling, SeqStep, StepInput, Task, WorkerFacts

TOKENS = 16


def warm_up_steps(facts: WorkerFacts, row: int) -> list[StepInput]:
    steps: list[StepInput] = []
    if "generate" in facts.tasks:
        steps += _generation(facts, row)
    pooling = [task for task in facts.tasks if task != "generate"]
    if pooling:
        steps.append(_pooling(facts, row, cast("Task", pooling[0])))
    return steps


def _generation(facts: WorkerFacts, row: int) -> list[StepInput]:
    """A prefill and a decode."""
    length = min(TOKENS, facts.max_model_len - 1)
    params = Sampling(max_tokens=2, top_p=0.9)
    new = NewSeq(slot=row, tokens=[0] * length, prompt_len=length, params=params)
    blocks = _scratch(facts, length + 1)
    prefill = SeqStep(slot=row, start=0, count=length, blocks=blocks, samples=True)
    decode = SeqStep(slot=row, start=length, count=1, blocks=[], samples=True, output_index=1)
    return [StepInput(number=0, new=[new], seqs=[prefill]), StepInput(number=0, new=[], seqs=[decode])]


def _pooling(facts: WorkerFacts, row: int, task: Task) -> StepInput:
    length = min(TOKENS, facts.max_model_len)
    new = NewSeq(slot=row, tokens=[0] * length, prompt_len=length, params=Pooling(task=task))
    blocks = _scratch(facts, length)
    seq = SeqStep(slot=row, start=0, count=length, blocks=blocks, samples=False, pools=True)
    return StepInput(number=0, new=[new], seqs=[seq])


def _scratch(facts: WorkerFacts, positions: int) -> list[int]:
    """Positions may share a place: what is written there is never read by anyone else."""
    return [facts.num_blocks] * -(-positions // facts.block_size) if facts.causal else []
