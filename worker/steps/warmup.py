"""The first steps a worker takes: real ones, in the slot and the cache block that no sequence uses."""

from __future__ import annotations

from typing import cast

from msgspec.structs import replace

from worker.protocol import NewSeq, Pooling, Sampling, SeqStep, StepInput, Task, WorkerFacts

TOKENS = 16


def warm_up_steps(facts: WorkerFacts, slot: int, replicas: int = 1) -> list[StepInput]:
    """The steps of a worker that shares experts with those of so many `replicas`, which all take the same."""
    steps: list[StepInput] = []
    if "generate" in facts.tasks:
        steps += _generation(facts, slot)
    pooling = [task for task in facts.tasks if task != "generate"]
    if pooling:
        steps.append(_pooling(facts, slot, cast("Task", pooling[0])))
    if replicas == 1:
        return steps
    return [replace(step, replica_tokens=[_tokens(step)] * replicas) for step in steps]


def _tokens(step: StepInput) -> int:
    return sum(seq.count for seq in step.seqs)


def _generation(facts: WorkerFacts, slot: int) -> list[StepInput]:
    """A prefill and a decode."""
    length = min(TOKENS, facts.max_model_len - 1)
    params = Sampling(max_tokens=2, top_p=0.9)
    new = NewSeq(slot=slot, tokens=[0] * length, prompt_len=length, params=params)
    blocks = _scratch(facts, length + 1)
    prefill = SeqStep(slot=slot, start=0, count=length, blocks=blocks, samples=True)
    decode = SeqStep(slot=slot, start=length, count=1, blocks=[], samples=True, output_index=1)
    return [StepInput(number=0, new=[new], seqs=[prefill]), StepInput(number=0, new=[], seqs=[decode])]


def _pooling(facts: WorkerFacts, slot: int, task: Task) -> StepInput:
    length = min(TOKENS, facts.max_model_len)
    new = NewSeq(slot=slot, tokens=[0] * length, prompt_len=length, params=Pooling(task=task))
    blocks = _scratch(facts, length)
    seq = SeqStep(slot=slot, start=0, count=length, blocks=blocks, samples=False, pools=True)
    return StepInput(number=0, new=[new], seqs=[seq])


def _scratch(facts: WorkerFacts, positions: int) -> list[int]:
    """The scratch block, as often as needed: no sequence reads what is written there."""
    return [facts.num_blocks] * -(-positions // facts.block_size) if facts.causal else []
