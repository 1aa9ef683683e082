"""The steps that have not landed: which of them the engine's own thread runs."""

from __future__ import annotations

from typing import Any

import pytest

from engine_core.scheduling.planned_step import PlannedStep
from engine_core.steps_in_flight import StepsInFlight
from worker.host.progress_page import ProgressWriter, StepProgress
from worker.protocol import StepInput


class Threads:
    """An executor that notes the numbers of steps by the thread that would run them."""

    def __init__(self) -> None:
        self.here: list[int] = []
        self.workers: list[int] = []

    def submit(self, step: StepInput) -> object:
        self.workers.append(step.number)
        return object()

    def submit_here(self, step: StepInput) -> object:
        self.here.append(step.number)
        return object()


def planned(texts: int, others: int) -> PlannedStep:
    seqs: list[Any] = [None] * (texts + others)
    step = StepInput(0, [], [])
    return PlannedStep(step, seqs, [], [], False, False, 0.0, 0.0, 1, 0, texts, is_decoding=False)


@pytest.mark.parametrize(
    ("texts", "others", "seconds", "is_here"),
    [
        (1, 0, 0.001, True),
        (2, 0, 0.001, True),
        (1, 0, 0.1, False),
        (1, 1, 0.001, False),
        (0, 1, 0.001, False),
    ],
)
def test_a_short_step_of_texts_alone_runs_in_the_engines_thread(
    texts: int, others: int, seconds: float, is_here: bool
) -> None:
    executor: Any = Threads()
    steps = StepsInFlight(executor, StepProgress(ProgressWriter("")), 2, executor.submit_here)
    steps.submit(planned(texts, others), StepInput(1, [], []), seconds)
    steps.submit(planned(1, 0), StepInput(2, [], []), 0.001)  # which waits for the one before
    assert (executor.here, executor.workers) == (([1], [2]) if is_here else ([], [1, 2]))
