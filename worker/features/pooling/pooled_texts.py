"""Pooling as a feature: the sequences of a step that become vectors or scores when they are complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import torch
from torch import Tensor

from models.context import ForwardContext
from models.pooling.pooler import Pooler
from worker.capacity import WorkerLimits
from worker.config import WorkerConfig
from worker.features.pooling.vectors import (
    MOST_QUERY_BYTES,
    HiddenStore,
    PoolPlan,
    QueryStore,
    apply_late_interaction,
    gather_hidden,
    plan_pools,
    segments_of,
    widths,
    with_pieces,
)
from worker.protocol import StepInput
from worker.steps.batch import Batch, Outcome, Pool, PooledVectors
from worker.steps.feature import Feature
from worker.tables.positions import Columns, PlainRead, Read, TypeReads
from worker.tables.slots import Slots
from worker.tables.staging import Packet
from worker.tasks import whole_tasks
from worker.worker_facts import WorkerFacts


class PooledTexts(Feature):
    """Texts of which results are made of the hidden states of the step that completes them."""

    _slots: Slots
    _store: HiddenStore | None = None
    """All last hidden states, if some task reads those of earlier steps."""

    def __init__(
        self,
        pooler: Pooler,
        tasks: tuple[str, ...],
        config: WorkerConfig,
        block_size: int,
        dtype: torch.dtype,
        allocate: Callable[[int], Tensor],
    ) -> None:
        """`allocate` takes memory of the device."""
        self._pooler, self._tasks, self._config = pooler, tasks, config
        self._block_size, self._dtype, self._allocate = block_size, dtype, allocate
        self._whole = whole_tasks(tasks, pooler)
        self._last = config.place.stage == config.place.stages - 1
        self._width = config.model.output_size if self._whole and self._last else 0
        self._queries = QueryStore()

    def step_bytes(self, limits: WorkerLimits) -> int:
        """Tell the bytes of hidden states, of float32 copies on their way to results, and of queries."""
        each = self._config.model.hidden_size * (self._dtype.itemsize + 3 * 4)
        return limits.max_pooled_tokens * each + MOST_QUERY_BYTES

    def open(self, limits: WorkerLimits, slots: Slots, blocks: int) -> Sequence[Tensor]:
        self._slots = slots
        return ()

    def add_facts(self, facts: WorkerFacts) -> WorkerFacts:
        return msgspec.structs.replace(
            facts,
            widths=widths(self._tasks, self._pooler),
            whole_tasks=self._whole,
        )

    def plan_pools(self, columns: Columns, packet: Packet) -> Sequence[Pool]:
        plan = plan_texts(self._slots, self._pooler, columns, packet)
        return [partial(self._pool, plan)] if plan else ()

    def _pool(self, plan: PoolPlan, batch: Batch, outcome: Outcome, pooled: PooledVectors) -> None:
        inputs = gather_hidden(plan, outcome.hidden, self._store, self._slots)
        apply_late_interaction(plan, inputs, self._pooler, self._queries, pooled)


class StoredTexts(PooledTexts):
    """Texts of a decoder with tasks that read all of their hidden states, which are stored block by block."""

    def keeps_all_blocks(self) -> bool:
        return True

    def block_bytes(self, longest: int) -> int:
        return self._block_size * self._width * self._dtype.itemsize

    def open(self, limits: WorkerLimits, slots: Slots, blocks: int) -> Sequence[Tensor]:
        super().open(limits, slots, blocks)
        if not self._width:
            return ()
        self._store = HiddenStore(blocks, self._block_size, self._width, self._dtype, self._allocate)
        return [self._store.blocks]

    def keep(self, hidden: Tensor, step: ForwardContext) -> None:
        if self._store is not None:
            self._store.write(hidden, step)


class EncodedTexts(PooledTexts):
    """The texts of an encoder, which computes each whole, and may have them in pairs or filled up."""

    def read(self, columns: Columns, step: StepInput) -> Sequence[Read]:
        """Tell the second texts of pairs from the first, or which first tokens of each text are seen."""
        reads, params = list[Read](), [self._slots.pooling[slot] for slot in columns.slots]
        begins = [each.second_at if each else 0 for each in params]
        if any(begins):
            lengths = zip(begins, columns.counts, strict=True)  # a text is computed whole
            types = [int(0 < second <= at) for second, count in lengths for at in range(count)]
            reads.append(TypeReads(types))
        unseen = [each.unseen if each else 0 for each in params]
        if not any(unseen):
            return reads
        seen = [count - few for count, few in zip(columns.counts, unseen, strict=True)]

        def show(context: ForwardContext) -> None:
            context.seen = seen

        return [*reads, PlainRead(lambda packet: show)]


def plan_texts(slots: Slots, pooler: Pooler, columns: Columns, packet: Packet) -> PoolPlan | None:
    """Plan the pooling of a step's texts that are complete; None: none of them is pooled by the pooler."""
    params = {row: slots.pooling[columns.slots[row]] for row in columns.pooling}
    if None in params.values():
        raise ValueError("a step pools a sequence that was not admitted for it")
    asked = {row: each for row, each in params.items() if each is not None and each.task != "align"}
    if not asked:
        return None
    rows, params = [*asked], [*asked.values()]
    texts = [slots.texts[columns.slots[row]] for row in rows]
    needed = [pooler.needed_positions(own, text) for own, text in zip(params, texts, strict=True)]
    if not any(columns.starts) and [len(own) for own in needed] == columns.counts:  # an encoder's texts
        plan = PoolPlan(rows, params, segments_of(packet, columns.counts, params), None, texts)
    else:
        plan = plan_pools(packet, columns, rows, params, needed, texts)
    if any(own.outputs or own.spans for own in params):
        return with_pieces(plan, packet, pooler)
    return plan
