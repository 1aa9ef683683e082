"""A runner whose sequences have adapters, driven step by step."""

from itertools import count
from pathlib import Path
from typing import Any

from worker.calls.messages import ENTER_ADAPTER, READ_ADAPTER, WorkerCall
from worker.protocol import NewSeq, Sampling, SeqStep, StepInput
from worker.runner import Runner

PROMPTS = [list(range(20 + 7 * row, 20 + 7 * row + 5 + row)) for row in range(4)]
OUTPUTS = 5


def call(runner: Runner, method: str, *args: Any) -> Any:
    returned = runner.call(WorkerCall(1, method, list(args)))
    if returned.error:
        raise ValueError(returned.error)
    return returned.result


def load(runner: Runner, number: int, folder: Path) -> Any:
    facts = call(runner, READ_ADAPTER, number, str(folder))
    call(runner, ENTER_ADAPTER, number)
    return facts


_numbers = count(1)


def generate(
    runner: Runner, adapters: dict[int, tuple[int, int]], logprobs: int | None = 3
) -> dict[int, list[tuple[int, list[float]]]]:
    """slot -> tokens, each with its logprobs. `adapters`: slot -> the adapter and its first position."""
    params = Sampling(max_tokens=OUTPUTS, temperature=0, logprobs=logprobs)
    found: dict[int, list[tuple[int, list[float]]]] = {slot: [] for slot in adapters}
    for index in range(OUTPUTS):
        new = [
            NewSeq(
                slot,
                PROMPTS[slot],
                len(PROMPTS[slot]),
                params,
                adapter=adapters[slot][0],
                adapter_from=adapters[slot][1],
            )
            for slot in adapters
        ]
        rows = [
            SeqStep(slot, len(PROMPTS[slot]) + index - 1, 1, [], samples=True, output_index=index)
            if index
            else SeqStep(slot, 0, len(PROMPTS[slot]), [2 * slot, 2 * slot + 1], samples=True)
            for slot in adapters
        ]
        output = runner.launch(StepInput(next(_numbers), [] if index else new, rows)).result()
        reported = output.logprobs or [None] * len(output.tokens)
        for slot, token, each in zip(adapters, output.tokens, reported, strict=True):
            found[slot].append((token, [] if each is None else each.values))
    return found
