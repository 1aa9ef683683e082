"""The tasks that requests may ask for, by what they read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from models.pooling.task_heads import Pooler
from worker.protocol import Pooling, Task

POOLED: tuple[Task, ...] = get_args(Task)
"""The tasks that are no sampling, in the order in which they are told."""


def samples(tasks: Sequence[str]) -> bool:
    """Whether some of these tasks sample tokens."""
    return "generate" in tasks or "transcription" in tasks


def pools(tasks: Sequence[str]) -> bool:
    """Whether some of these tasks do anything else."""
    return any(not samples([task]) for task in tasks)


def whole_tasks(tasks: Sequence[str], pooler: Pooler) -> tuple[str, ...]:
    """The tasks that read all hidden states of a sequence."""
    return tuple(task for task in by_pooler(tasks) if pooler.needs_all_rows(Pooling(task=task)))


def by_pooler(tasks: Sequence[str]) -> list[Task]:
    """Find the tasks that a pooler answers from hidden states."""
    return [task for task in POOLED if task in tasks and task != "align"]
