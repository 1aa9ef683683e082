"""The choice between joined kernels and those of single operations, by what a card takes for whole steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from worker.kernels.cuda.capabilities import COUNTERS, JOINED_ROWS
from worker.kernels.cuda.launch import joining
from worker.kernels.cuda.steps.graph_capture import GraphRecording, Missing, Recorder

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class JoinedSteps:
    """Records steps of few rows with joined kernels and without, and keeps what the device does sooner."""

    def __init__(self, target: torch.device) -> None:
        self._counters = torch.zeros(COUNTERS, dtype=torch.int32, device=target)
        self._faster: dict[int, bool] = {}
        """Whether joined kernels are, by the rows of steps for which it is known."""

    def record(
        self, recorder: Recorder, rows: int, open_work: Callable[[], Callable[[], Result]]
    ) -> GraphRecording[Result] | Missing:
        """Record the work of a step of single tokens of so many rows, which `open_work` returns."""
        if rows > JOINED_ROWS or self._faster.get(rows) is False:
            return recorder.record(open_work)

        def open_joined() -> Callable[[], Result]:
            work = open_work()

            def work_joined() -> Result:
                with joining(self._counters):
                    return work()

            return work_joined

        joined = recorder.record(open_joined)
        if rows in self._faster and not isinstance(joined, Missing):
            return joined
        plain = recorder.record(open_work)
        if isinstance(plain, Missing):
            return plain
        if isinstance(joined, Missing):
            self._faster[rows] = False
            logger.warning("steps of %d rows are computed by single kernels: %s", rows, joined.reason)
            return plain
        self._faster[rows], times = recorder.compare(joined, plain)
        logger.info("steps of %d rows take %.3f ms with joined kernels, and %.3f ms without", rows, *times)
        return joined if self._faster[rows] else plain
