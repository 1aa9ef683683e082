"""Computes steps of texts that are all pooled in the same way by one call of C.

It lays the tokens out, computes the model's layers, merges and normalises, and finds what is not finite.
Python writes tokens and columns before it, and copies vectors behind it. One recording of each task is made
when the model is loaded, for texts of any number and lengths. A step whose texts are asked for in several
ways, or in one that cannot be recorded, runs as others do.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from models.context import ForwardContext
from models.model import Forward
from models.ops.pooling_ops import Segments
from models.pooling.task_heads import PoolBatch, Pooler, TaskHead
from worker.kernels.cpu.library import Library
from worker.kernels.cpu.recording import MOST_TOKENS, Computed, Layout, Recording
from worker.protocol import Pooling, StepOutput, Vectors
from worker.steps.batch import LandedStep, NotedStep
from worker.steps.compute import Unrecordable
from worker.steps.output import NOT_FINITE_VALUES
from worker.tables.positions import StepTokens, TypeReads

logger = logging.getLogger(__name__)

_COLUMNS = 4
"""Slots, starts, counts, and tokens that are not merged."""


@dataclass(frozen=True, slots=True)
class _Way:
    """A recorded way of pooling."""

    recording: Recording
    head: TaskHead
    is_whole: bool
    """Whether it has all that the head does, and not merging alone, behind which torch does the rest."""
    vectors: memoryview
    """The result of the recording [MOST_TOKENS, width] float32."""


class PooledSteps:
    """Computes a step by one call of C, if its texts are pooled in one way that is recorded."""

    def __init__(self, forward: Forward, pooler: Pooler, library: Library, layout: Layout) -> None:
        """Record the tasks of a pooler that give a text one vector."""
        self._forward, self._library, self._layout = forward, library, layout
        self._columns = torch.zeros(_COLUMNS * MOST_TOKENS, dtype=torch.int32)
        self._merged = torch.zeros(MOST_TOKENS, 3, dtype=torch.int32)
        self._types = torch.zeros(MOST_TOKENS, dtype=torch.int64)
        self._finite = torch.zeros(MOST_TOKENS, dtype=torch.int8)
        self._write_columns, self._write_types = self._columns.numpy().data, self._types.numpy().data
        self._tables = layout.slots.tokens.numpy(), layout.slots.block_tables.numpy()
        self._find_finite = library.unrecorded("find_finite", quick=True)
        self._read_finite = self._finite.numpy().data
        self._has_types = False
        """Whether some tokens of the last step had a type other than 0."""
        self._ways: dict[str, _Way] = {}
        for task, head in pooler.heads.items():
            if not head.is_merged or head.sparse or head.reduce:
                continue
            for is_whole in (True, False):
                try:
                    self._ways.setdefault(task, self._record(head, is_whole))
                    break
                except Exception as reason:  # of the head's own code, too
                    logger.debug("steps of texts for %s are not one call: %s", task, reason)

    def __bool__(self) -> bool:
        return bool(self._ways)

    def __call__(self, noted: NotedStep) -> LandedStep | None:
        columns, slots = noted.columns, self._layout.slots
        rows, tokens = len(columns.slots), columns.query_starts[-1]
        if len(columns.pooling) != rows or tokens > MOST_TOKENS or noted.tells:
            return None
        params = [slots.pooling[slot] for slot in columns.slots]
        if (first := params[0]) is None or (way := self._ways.get(first.task)) is None:
            return None
        if (skips := _skips_of(params, first, way)) is None:
            return None
        if (way.head.rows.needs_all and any(columns.starts)) or not self._write_reads(noted):
            return None
        noted.write_tables(*self._tables, slots)
        table = array("i", columns.slots + columns.starts + columns.counts + skips)
        self._write_columns[: len(table)] = table
        way.recording.replay(tokens, rows)
        if way.is_whole:
            return LandedStep(self._tell(noted, way.vectors))
        merged = way.recording.result[:rows]
        answers = way.head.answer(merged, first.use_activation, first.dimensions).contiguous()
        self._find_finite(answers.data_ptr(), *answers.shape, self._finite.data_ptr())
        return LandedStep(self._tell(noted, answers.numpy().data))

    def _write_reads(self, noted: NotedStep) -> bool:
        """Write what the step reads beside tokens; returns whether there was room for all of it."""
        types = noted.columns.find(TypeReads)
        if len(noted.columns.reads) > (types is not None):
            return False
        if self._has_types:
            self._types.zero_()
        if types is not None:
            self._write_types[: len(types.types)] = array("l", types.types)
        self._has_types = types is not None
        return True

    def _tell(self, noted: NotedStep, vectors: memoryview) -> StepOutput:
        """`vectors` [rows or more, width] float32."""
        columns, shape = noted.columns, (vectors.shape or ())[1:]
        pooled, failed = dict[int, Vectors](), dict[int, str]()
        for row, (slot, is_finite) in enumerate(zip(columns.slots, self._read_finite, strict=False)):
            if is_finite:
                pooled[slot] = Vectors(vectors[row : row + 1].tobytes(), shape)
            else:
                failed[slot] = NOT_FINITE_VALUES
        return StepOutput(noted.step.number, [-1] * len(columns.slots), [], {}, failed, pooled)

    def _record(self, head: TaskHead, is_whole: bool) -> _Way:
        def compute(ids: Tensor, step: ForwardContext) -> Computed:
            rows = step.kv_lens.shape[0]
            self._layout.record(rows, self._columns, self._merged)
            hidden = self._forward(ids, step.positions, None)
            segments = Segments([(0, 0, 0)] * rows, self._merged[:rows])  # the kernel reads the tensor alone
            vectors = head.merge(PoolBatch(hidden, segments, ()))
            if is_whole:
                vectors = head.answer(vectors, None, None)
            if vectors.shape[0] != rows or not vectors.is_contiguous():
                raise Unrecordable(f"its result {list(vectors.shape)} is not a row for each text")
            find_finite(vectors.data_ptr(), *vectors.shape, self._finite.data_ptr())
            return vectors, ()

        find_finite = self._library.function("find_finite")
        recording = Recording(compute, self._library, self._layout, self._batch)
        return _Way(recording, head, is_whole, recording.result.numpy().data)

    def _batch(self, tokens: int, rows: int) -> StepTokens:
        ids, step = self._layout.small_batch(tokens, rows)
        step.token_types = self._types[:tokens]
        return ids, step


def _skips_of(params: Iterable[Pooling | None], first: Pooling, way: _Way) -> list[int] | None:
    """The tokens at the beginning of each text that are not merged.

    None: the texts are not all pooled like the first one, or something is asked for that is not computed.
    """
    if way.is_whole and (first.use_activation is not None or first.dimensions):
        return None
    asked, skips = (first.task, first.use_activation, first.dimensions), list[int]()
    for own in params:
        if own is None or (own.task, own.use_activation, own.dimensions) != asked:
            return None
        if own.outputs or own.spans or own.unseen or own.late_query or own.late_document:
            return None
        skips.append(own.skip)
    return skips
