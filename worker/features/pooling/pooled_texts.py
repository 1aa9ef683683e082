"""Pooling as a feature: the sequences of a step that become vectors or scores when they are complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    RowChoice,
    apply_late_interaction,
    gather_hidden,
    plan_pools,
    segments_of,
    vector_facts,
    widths,
    with_pieces,
)
from worker.protocol import Pooling, StepInput
from worker.steps.batch import Batch, Outcome, PooledVectors
from worker.steps.feature import Feature, Read
from worker.tables.positions import Columns
from worker.tables.slots import Slots
from worker.tables.staging import Packet
from worker.tasks import whole_tasks
from worker.worker_facts import WorkerFacts


class PooledTexts(Feature):
    _slots: Slots
    _store: HiddenStore | None = None
    """All last hidden states, if some task reads those of earlier steps."""
    _plan: PoolPlan | None = None
    """The plan of the step that is computed."""

    def __init__(
        self,
        pooler: Pooler,
        tasks: tuple[str, ...],
        config: WorkerConfig,
        block_size: int,
        dtype: torch.dtype,
        allocate: Callable[[int], Tensor],
        digest: Callable[[], str],
    ) -> None:
        """`allocate` takes memory of the device; `digest` finds what vectors have of the model."""
        self._pooler, self._tasks, self._config = pooler, tasks, config
        self._block_size, self._dtype, self._allocate, self._digest = block_size, dtype, allocate, digest
        self._whole = whole_tasks(tasks, pooler)
        self._last = config.place.stage == config.place.stages - 1
        self._width = config.model.output_size if self._whole and self._last else 0
        self._queries = QueryStore()

    def keeps_all_blocks(self) -> bool:
        return bool(self._whole)

    def step_bytes(self, limits: WorkerLimits) -> int:
        """Tell the bytes of hidden states, of float32 copies on their way to results, and of queries."""
        each = self._config.model.hidden_size * (self._dtype.itemsize + 3 * 4)
        return limits.max_pooled_tokens * each + MOST_QUERY_BYTES

    def block_bytes(self, longest: int) -> int:
        return HiddenStore.block_bytes(self._block_size, self._width, self._dtype)

    def open(self, limits: WorkerLimits, slots: Slots, blocks: int) -> Sequence[Tensor]:
        self._slots = slots
        if not (self._width and slots.paged):
            return ()
        self._store = HiddenStore(blocks, self._block_size, self._width, self._dtype, self._allocate)
        return [self._store.blocks]

    def add_facts(self, facts: WorkerFacts) -> WorkerFacts:
        return msgspec.structs.replace(
            facts,
            widths=widths(self._tasks, self._pooler),
            whole_tasks=self._whole,
            vectors=vector_facts(self._tasks, self._pooler, self._digest()),
        )

    def stage(self, columns: Columns, step: StepInput, packet: Packet) -> None:
        self._plan = None
        for seq in step.seqs:
            if seq.pools:
                self._plan = plan_texts(self._slots, self._pooler, columns, step, packet)
                return

    def keep(self, hidden: Tensor, step: ForwardContext) -> None:
        if self._store is not None:
            self._store.write(hidden, step)

    def pool(self, batch: Batch, outcome: Outcome, pooled: PooledVectors) -> None:
        if (plan := self._plan) is not None:
            inputs = gather_hidden(plan, outcome.hidden, self._store, self._slots)
            apply_late_interaction(plan, inputs, self._pooler, self._queries, pooled)


class EncodedTexts(PooledTexts):
    """The texts of an encoder, which computes each whole, and may have them in pairs or filled up."""

    def lay(self, columns: Columns, step: StepInput) -> None:
        """Tell the second texts of pairs from the first."""
        pooling = self._slots.pooling
        begins = [params.second_at if (params := pooling[slot]) else 0 for slot in columns.slots]
        if any(begins):
            lengths = zip(begins, columns.counts, strict=True)  # a text is computed whole
            columns.types = [int(0 < second <= at) for second, count in lengths for at in range(count)]

    def read(self, columns: Columns, step: StepInput) -> Read | None:
        """Tell which first tokens of each text are seen, if those are not all."""
        pooling = self._slots.pooling
        unseen = [params.unseen if (params := pooling[slot]) else 0 for slot in columns.slots]
        if not any(unseen):
            return None
        seen = [count - few for count, few in zip(columns.counts, unseen, strict=True)]

        def show(context: ForwardContext) -> None:
            context.seen = seen

        return Read(lambda packet: show)


def plan_texts(
    slots: Slots, pooler: RowChoice, columns: Columns, step: StepInput, packet: Packet
) -> PoolPlan | None:
    """Plan the pooling of a step's texts that are complete; None: there are none."""
    chosen = [row for row, seq in enumerate(step.seqs) if seq.pools]
    if not chosen:
        return None
    params = {row: slots.pooling[columns.slots[row]] for row in chosen}
    if None in params.values():
        raise ValueError("a step pools a sequence that was not admitted for it")
    asked = {row: each for row, each in params.items() if each is not None and each.task != "align"}
    return _plan_rows(slots, pooler, columns, asked, packet) if asked else None


def _plan_rows(
    slots: Slots, pooler: RowChoice, columns: Columns, asked: dict[int, Pooling], packet: Packet
) -> PoolPlan:
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
