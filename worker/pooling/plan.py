"""The sequences that a step pools: which hidden states go to the model's pooler, and the result of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from models.ops.pooling_ops import Segments
from models.pooling.pooler import PoolBatch, Pooler
from worker.config import WorkerConfig
from worker.pooling.hidden import HiddenStore
from worker.pooling.late_interaction import QueryStore, max_sim
from worker.protocol import QUERY_GONE, Pooling, Task
from worker.tables.slots import Slots
from worker.tables.staging import Packet

_TASKS: tuple[Task, ...] = get_args(Task)
_UNCUT = 1 << 30
_WAYS = "leave it out, or make another model of the checkpoint with --runner and --convert"


def offered_tasks(config: WorkerConfig, pooler: Pooler) -> tuple[str, ...]:
    """The tasks that requests may ask for: all that the model can do, or those the operator wants."""
    generates = ("generate",) if config.conversion.runner == "generate" else ()
    wanted = config.pooling.task
    able = generates + tuple(
        task for task in _TASKS if task in pooler.tasks and (wanted is None or task == wanted)
    )
    if wanted is not None and wanted not in able:
        raise ValueError(
            f"--pooler-config asks for {wanted}, and this model offers {_list(pooler.tasks)}: {_WAYS}"
        )
    if missing := [task for task in config.tasks if task not in able]:
        raise ValueError(
            f"--tasks asks for {', '.join(missing)}, and this model, served with --runner "
            f"{config.conversion.runner}, offers {', '.join(able)}: {_WAYS}"
        )
    if config.tasks:
        return tuple(task for task in able if task in config.tasks)
    if not generates or wanted is not None:
        return able
    # Beside generation, tasks for single tokens are offered on demand only: they store all hidden states.
    return tuple(task for task in able if not task.startswith("token_"))


def _list(tasks: frozenset[str]) -> str:
    return ", ".join(task for task in _TASKS if task in tasks)


def widths(tasks: tuple[str, ...], pooler: Pooler) -> dict[str, int]:
    """The numbers in each vector of a task, before any cut."""
    return {task: pooler.width(Pooling(task=task, dimensions=_UNCUT)) for task in _TASKS if task in tasks}


def whole_tasks(tasks: tuple[str, ...], pooler: Pooler) -> tuple[str, ...]:
    """The tasks that read all hidden states of a sequence."""
    return tuple(task for task in _TASKS if task in tasks and pooler.needs_all_rows(Pooling(task=task)))


@dataclass(frozen=True, slots=True)
class NeededStates:
    """The N hidden states that a step pools: the first M are the step's own, the rest older."""

    here: Tensor  # [M] indices in the step
    slots: Tensor  # [N]
    positions: Tensor  # [N]


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The sequences that a step pools, and the hidden states of each."""

    rows: list[int]  # index of each sequence in StepInput.seqs, in the order of the hidden states
    params: list[Pooling]
    segments: Segments  # the hidden states of each sequence
    needed: NeededStates | None  # None: all of the step, in its order


def segments_of(packet: Packet, lengths: Sequence[int], params: Sequence[Pooling]) -> Segments:
    """The places of sequences with so many hidden states, one behind the other, sent with the step."""
    return Segments.packed(
        lengths, [each.skip for each in params], lambda places: packet.ints(np.ravel(places))
    )


def plan_pools(
    packet: Packet,
    *,
    rows: np.ndarray,  # [P] for each pooled sequence, as all that follows
    params: list[Pooling],
    needed: Sequence[Sequence[int]],
    slots: np.ndarray,
    starts: np.ndarray,
    query_starts: np.ndarray,
) -> PoolPlan:
    """Plan the pooling of sequences of which the positions `needed` are pooled, computed now or earlier."""
    # Sequences that the step computes wholly, as far as they are needed, come before the others.
    is_older = np.array([bool(own) and own[0] < start for own, start in zip(needed, starts, strict=True)])
    order = np.argsort(is_older, kind="stable")
    lengths = np.array([len(needed[index]) for index in order])
    positions = np.concatenate([np.asarray(needed[index], np.int64) for index in order])  # [N]
    here = int(lengths[~is_older[order]].sum())  # M
    at = positions + np.repeat((query_starts - starts)[order], lengths)
    return PoolPlan(
        rows=rows[order].tolist(),
        params=[params[index] for index in order],
        segments=segments_of(packet, lengths.tolist(), [params[index] for index in order]),
        needed=NeededStates(
            here=packet.ints(at[:here]),
            slots=packet.ints(np.repeat(slots[order], lengths)),
            positions=packet.ints(positions),
        ),
    )


@dataclass(frozen=True, slots=True)
class PooledVectors:
    """The results of pooling, on the device, and the sequences that failed before they had one."""

    rows: list[int] = field(default_factory=list[int])  # indices in StepInput.seqs
    vectors: list[Tensor] = field(default_factory=list[Tensor])  # float32 [D] or [K, D] each
    failed: dict[int, str] = field(default_factory=dict[int, str])  # index -> why


def gather_hidden(plan: PoolPlan, hidden: Tensor, store: HiddenStore | None, slots: Slots) -> PoolBatch:
    """The pooler's input. `hidden` [T, H]: the step's hidden states."""
    needed = plan.needed
    if needed is None:
        return PoolBatch(hidden, plan.segments, plan.params)
    states = hidden[needed.here]  # [M, H]
    count = len(states)  # M
    if count < len(needed.positions):
        if store is None:
            raise ValueError("a pooled sequence needs hidden states of earlier steps, which are not stored")
        older = store.read(slots.block_table, needed.slots[count:], needed.positions[count:])
        states = torch.cat([states, older])  # [N, H]
    return PoolBatch(states, plan.segments, plan.params)


def apply_late_interaction(plan: PoolPlan, vectors: list[Tensor], queries: QueryStore) -> PooledVectors:
    """The pooler's vectors, replaced by a score where late interaction is asked for."""
    for params, own in zip(plan.params, vectors, strict=True):
        if params.late_query:  # before any document of the same step
            queries.put(params.late_query, own)
    pooled = PooledVectors()
    for row, params, own in zip(plan.rows, plan.params, vectors, strict=True):
        result = _score(params, own, queries)
        if isinstance(result, str):
            pooled.failed[row] = result
        else:
            pooled.rows.append(row)
            pooled.vectors.append(result)
    return pooled


def _score(params: Pooling, own: Tensor, queries: QueryStore) -> Tensor | str:
    if params.late_query:
        return max_sim(own, own)
    if not params.late_document:
        return own
    query = queries.get(params.late_document)
    if query is None:
        return QUERY_GONE
    if query.shape[-1] != own.shape[-1]:
        return f"the query's vectors have {query.shape[-1]} numbers and the document's {own.shape[-1]}"
    return max_sim(query, own)
