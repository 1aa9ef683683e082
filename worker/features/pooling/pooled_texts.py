"""Pooling as a feature: the sequences of a step that become vectors or scores when they are complete.

A prompt that was read in chunks, or whose beginning was found in the cache, computes only its last positions
in its last step. Pooling that needs all of them finds the others in a paged store. Late interaction scores a
document by the sum, over a query's tokens, of the best match in the document. A query's vectors are stored
under a name, so that its documents bring nothing but themselves and are answered with one number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from models.context import ForwardContext
from models.ops.pooling_ops import Segments
from models.pooling.task_heads import Pieces, PoolBatch, Pooler
from worker.capacity import WorkerLimits
from worker.config import WorkerConfig
from worker.protocol import QUERY_GONE, Pooling, StepInput
from worker.steps.batch import Batch, Outcome, Pool, PooledRow, PooledVectors
from worker.steps.feature import Feature
from worker.tables.positions import Columns, PlainRead, Read, TypeReads
from worker.tables.slots import Slots
from worker.tables.staging import Packet
from worker.tasks import by_pooler, whole_tasks
from worker.worker_facts import WorkerFacts

MOST_QUERY_BYTES = 64 << 20
"""The bytes of vectors of queries that are stored: beyond, the query that was used longest ago is dropped."""

_UNCUT = 1 << 30


class HiddenStore:
    """The hidden states of all computed positions, in blocks of the same numbers as the KV cache's."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        width: int,
        dtype: torch.dtype,
        allocate: Callable[[int], Tensor],
    ) -> None:
        """`num_blocks`: without the scratch block. `allocate` takes so many bytes of the device's memory."""
        count = (num_blocks + 1) * block_size  # positions
        self._block_size = block_size
        self._rows = allocate(count * width * dtype.itemsize).view(dtype).view(count, width)

    @property
    def blocks(self) -> Tensor:
        """The rows of each block [blocks, positions, width]."""
        return self._rows.unflatten(0, (-1, self._block_size))

    def write(self, hidden: Tensor, context: ForwardContext) -> None:
        """Store the hidden states [T, width] of a step."""
        self._rows[context.slot_mapping] = hidden.to(self._rows.dtype)

    def read(self, block_table: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """The hidden states [N, width] of these positions [N] of the sequences in these slots [N]."""
        blocks = block_table[slots, positions // self._block_size].long()  # [N]
        return self._rows[blocks * self._block_size + positions % self._block_size]


class QueryStore:
    """The vectors of queries to which documents are compared."""

    def __init__(self, max_bytes: int = MOST_QUERY_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._vectors: OrderedDict[str, Tensor] = OrderedDict()

    def put(self, name: str, vectors: Tensor) -> None:
        """Store a query's vectors [Q, D]. The newest query is stored however large it is."""
        self._drop(name)
        self._vectors[name] = vectors.clone()  # or all that was pooled with it would stay in memory
        self._bytes += vectors.nbytes
        while self._bytes > self._max_bytes and len(self._vectors) > 1:
            self._drop(next(iter(self._vectors)))

    def get(self, name: str) -> Tensor | None:
        """The vectors [Q, D] of a query, which counts as its latest use."""
        if name in self._vectors:
            self._vectors.move_to_end(name)
        return self._vectors.get(name)

    def _drop(self, name: str) -> None:
        vectors = self._vectors.pop(name, None)
        self._bytes -= vectors.nbytes if vectors is not None else 0


def max_sim(query: Tensor, document: Tensor) -> Tensor:
    """The score [1] of a document [K, D] for a query [Q, D], float32; 0 if one of them has no tokens."""
    if not len(query) or not len(document):
        return torch.zeros(1, device=document.device)
    return (query @ document.T).amax(dim=1).sum().unsqueeze(0)


def widths(tasks: tuple[str, ...], pooler: Pooler) -> dict[str, int]:
    """The numbers in each vector of a task, before any cut."""
    return {task: pooler.width(Pooling(task=task, dimensions=_UNCUT)) for task in by_pooler(tasks)}


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
    texts: list[Sequence[int]]  # the tokens of each sequence
    pieces: Pieces | None = None
    counted: dict[int, Tensor] = field(default_factory=dict[int, Tensor])


def segments_of(packet: Packet, lengths: Sequence[int], params: Sequence[Pooling]) -> Segments:
    """The places of sequences with so many hidden states, one behind the other, sent with the step."""
    return Segments.packed(
        lengths, [each.skip for each in params], lambda places: packet.ints(np.ravel(places))
    )


def with_pieces(plan: PoolPlan, packet: Packet, pooler: Pooler) -> PoolPlan:
    """The plan, with what the device must know of spans, and of tokens whose vectors do not count."""
    pieces, counted = None, dict[int, Tensor]()
    if any(params.spans for params in plan.params):
        places: list[tuple[int, int, int]] = []
        for params, (start, first, stop) in zip(plan.params, plan.segments.on_host, strict=True):
            spans = [(start, start + one, start + other) for one, other in params.spans]
            places += spans or [(start, first, stop)]
        segments = Segments(places, packet.ints(np.ravel(places)).view(-1, 3))
        pieces = Pieces(segments, [len(params.spans) or 1 for params in plan.params])
    for index, (params, text) in enumerate(zip(plan.params, plan.texts, strict=True)):
        rows = pooler.counted_rows(params, text) if params.outputs else None
        if rows is not None:
            counted[index] = packet.ints(np.asarray(rows, np.int64))
    return plan if pieces is None and not counted else replace(plan, pieces=pieces, counted=counted)


def plan_pools(
    packet: Packet,
    columns: Columns,
    rows: list[int],
    params: list[Pooling],
    needed: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
) -> PoolPlan:
    """Plan the pooling of rows of which the positions `needed` are pooled, computed now or earlier."""
    starts = np.array(columns.starts)[rows]
    offsets = np.array(columns.query_starts)[rows] - starts
    # Sequences that the step computes wholly, as far as they are needed, come before the others.
    is_older = np.array([bool(own) and own[0] < start for own, start in zip(needed, starts, strict=True)])
    order = np.argsort(is_older, kind="stable")
    lengths = np.array([len(needed[index]) for index in order])
    positions = np.concatenate([np.asarray(needed[index], np.int64) for index in order])  # [N]
    here = int(lengths[~is_older[order]].sum())  # M
    at = positions + np.repeat(offsets[order], lengths)
    sorted_params = [params[index] for index in order]
    return PoolPlan(
        rows=[rows[index] for index in order],
        params=sorted_params,
        segments=segments_of(packet, lengths.tolist(), sorted_params),
        needed=NeededStates(
            here=packet.ints(at[:here]),
            slots=packet.ints(np.repeat(np.array(columns.slots)[rows][order], lengths)),
            positions=packet.ints(positions),
        ),
        texts=[texts[index] for index in order],
    )


def gather_hidden(plan: PoolPlan, hidden: Tensor, store: HiddenStore | None, slots: Slots) -> PoolBatch:
    """The pooler's input. `hidden` [T, H]: the step's hidden states."""
    needed = plan.needed
    if needed is None:
        return PoolBatch(hidden, plan.segments, plan.params, plan.pieces, plan.counted)
    states = hidden[needed.here]  # [M, H]
    count = len(states)  # M
    if count < len(needed.positions):
        if store is None:
            raise ValueError("a pooled sequence needs hidden states of earlier steps, which are not stored")
        older = store.read(slots.block_table, needed.slots[count:], needed.positions[count:])
        states = torch.cat([states, older])  # [N, H]
    return PoolBatch(states, plan.segments, plan.params, plan.pieces, plan.counted)


def apply_late_interaction(
    plan: PoolPlan, inputs: PoolBatch, pooler: Pooler, queries: QueryStore, pooled: PooledVectors
) -> None:
    """Add what the pooler makes of its inputs, replaced by a score where late interaction is asked for."""
    answers = list(_by_sequence(plan, pooler(inputs)))
    for params, (own, *_) in zip(plan.params, answers, strict=True):
        if params.late_query:  # before any document of the same step
            queries.put(params.late_query, own)
    for index, (params, (own, *others)) in enumerate(zip(plan.params, answers, strict=True)):
        row, result = plan.rows[index], _score(params, own, queries)
        if isinstance(result, str):
            pooled.failed[row] = result
            continue
        for task, each in zip((None, *params.outputs), (result, *others), strict=True):
            head = pooler.heads[task or params.task]
            tokens = None if head.sparse is None or head.is_merged else plan.texts[index]
            pooled.rows.append(PooledRow(row, task, tokens, head.sparse))
            pooled.vectors.append(each)


def _by_sequence(plan: PoolPlan, vectors: list[Tensor]) -> Iterator[list[Tensor]]:
    """The answers of each sequence: that of its task, and those of its other outputs."""
    start = 0
    for params in plan.params:
        stop = start + 1 + len(params.outputs)
        yield vectors[start:stop]
        start = stop


def _score(params: Pooling, own: Tensor, queries: QueryStore) -> Tensor | str:
    if params.late_query:
        return F.pad(max_sim(own, own), (0, 1), value=float(len(own)))
    if not params.late_document:
        return own
    query = queries.get(params.late_document)
    if query is None:
        return QUERY_GONE
    if query.shape[-1] != own.shape[-1]:
        return f"the query's vectors have {query.shape[-1]} numbers and the document's {own.shape[-1]}"
    return max_sim(query, own)


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
