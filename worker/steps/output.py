"""The output of a step: packed into one tensor on the device, unpacked on the host once that has arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from models.pooling.task_heads import SparseWeights
from worker.protocol import StepOutput, TokenLogprobs, Vectors
from worker.sampling.logprobs import unpack_logprobs
from worker.steps.batch import Batch, Outcome, PooledRow, PooledVectors, Tell

Fetch = Callable[[], np.ndarray]
"""The type of a function that waits for values on their way to the host, and returns them."""

NOT_FINITE = "the model produced non-finite logits"
NOT_FINITE_VALUES = "the model produced non-finite values"


class OutputDevice(Protocol):
    """The part of a device that the output of a step needs."""

    target: torch.device

    @property
    def kernel_compilations(self) -> int: ...

    def fetch(self, values: Tensor) -> Fetch: ...


def fetch_output(
    device: OutputDevice, batch: Batch, outcome: Outcome, pooled: PooledVectors, tells: Sequence[Tell]
) -> StepHandle:
    """Start the one copy to the host. Slots may have other sequences when the handle is read."""
    parts, tables, failed = list[Tensor](), [*outcome.prompt_tables], pooled.failed
    if tokens := outcome.tokens:
        parts.append(tokens.packed)
        tables[:0] = tokens.logprobs
        if tokens.failed and batch.sampled:
            failed = failed | {batch.sampled.rows[row]: reason for row, reason in tokens.failed.items()}
    parts += tables
    vectors = list[tuple[PooledRow, tuple[int, ...]]]()
    for row, own in zip(pooled.rows, pooled.vectors, strict=True):
        vectors.append((row, tuple(own.shape)))
    if vectors:
        parts.append(torch.cat([*map(torch.flatten, pooled.vectors)]).view(torch.int32))
    if not parts:
        parts.append(torch.empty(0, dtype=torch.int32, device=device.target))
    packed = torch.cat([*map(torch.flatten, parts)]) if len(parts) > 1 else parts[0].flatten()
    shapes = [(table.shape[0], table.shape[1]) for table in tables] if tables else ()
    given = shapes, vectors, failed, device.kernel_compilations, tells
    return StepHandle(batch, *given, device.fetch(packed))


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A step under way, with all that reading its output needs."""

    _batch: Batch
    _shapes: Sequence[tuple[int, int]]
    """The shapes of tables of log-probabilities."""
    _vectors: Sequence[tuple[PooledRow, tuple[int, ...]]]
    """The shape of the vectors of each pooled sequence, of which those of other outputs follow the first."""
    _refused: Mapping[int, str]
    _compiled: int
    """How many kernels the worker has compiled so far."""
    _tells: Sequence[Tell]
    _fetch: Fetch

    def result(self) -> StepOutput:
        """Wait for the output of this step, but not for later steps."""
        words, batch = self._fetch(), self._batch
        seqs, rows = batch.step.seqs, batch.sampled.rows if batch.sampled else ()
        count, tokens, failed = len(rows), [-1] * len(seqs), dict[int, str]()
        chosen, finite = words[:count].tolist(), words[count : 2 * count].tolist()
        for row, token, good in zip(rows, chosen, finite, strict=True):
            tokens[row] = token if good else -1
        for row, reason in self._refused.items():
            failed[seqs[row].slot] = reason
        output = StepOutput(batch.step.number, tokens, [], {}, failed, kernel_compilations=self._compiled)
        if self._shapes or self._vectors:
            output = self._complete(output, words, 2 * count)
        for tell in self._tells:
            output = tell(output)
        if all(finite):
            return output
        sampling = zip(batch.asked.seqs, output.tokens, strict=True)
        wrong = {seq.slot: NOT_FINITE for seq, token in sampling if seq.samples and token < 0}
        return msgspec.structs.replace(output, failed=wrong | output.failed)

    def _complete(self, output: StepOutput, words: np.ndarray, start: int) -> StepOutput:
        """Add the log-probabilities and the vectors behind the first words."""
        tables, failed = self._tables(words[start:]), dict(output.failed)
        logprobs = self._logprobs(tables)
        prompts = {wanted.slot: unpack_logprobs(next(tables)) for wanted in self._batch.prompt_logprobs}
        given = {"logprobs": logprobs, "prompt_logprobs": prompts, "pooled": self._pooled(words, failed)}
        return msgspec.structs.replace(output, **given, failed=failed)

    def _tables(self, words: np.ndarray) -> Iterator[np.ndarray]:
        start = 0
        for rows, width in self._shapes:
            yield words[start : start + rows * width].reshape(rows, width)
            start += rows * width

    def _pooled(self, words: np.ndarray, failed: dict[int, str]) -> dict[int, Vectors]:
        """Pooled vectors are the last int32 words of the copy. One that is not finite fails its sequence."""
        pooled: dict[int, Vectors] = {}
        start = len(words) - sum(prod(shape) for _, shape in self._vectors)
        all_finite = np.isfinite(words[start:].view(np.float32)).all()
        for row, shape in self._vectors:
            stop = start + prod(shape)
            numbers = words[start:stop].view(np.float32)
            slot = self._batch.step.seqs[row.row].slot
            start = stop
            if not (all_finite or np.isfinite(numbers).all()):
                pooled.pop(slot, None)
                failed[slot] = NOT_FINITE_VALUES
            elif slot in failed:  # by another of its outputs
                continue
            else:
                if row.sparse:
                    vectors = sparse_vectors(numbers, row.tokens, row.sparse)
                else:
                    vectors = Vectors(data=numbers.tobytes(), shape=shape)
                if not row.task:
                    pooled[slot] = vectors
                else:
                    first = pooled[slot]
                    pooled[slot] = msgspec.structs.replace(first, others={**first.others, row.task: vectors})
        return pooled

    def _logprobs(self, tables: Iterator[np.ndarray]) -> list[TokenLogprobs | None]:
        sampled = self._batch.sampled
        if not (sampled and sampled.plan.logprobs):
            return []
        entries: list[TokenLogprobs | None] = [None] * len(self._batch.step.seqs)
        for wanted in sampled.plan.logprobs:
            unpacked = unpack_logprobs(next(tables), len(wanted.told))
            for row, entry in zip(wanted.rows_host, unpacked, strict=True):
                entries[sampled.rows[row]] = entry
        return entries


def sparse_vectors(weights: np.ndarray, tokens: Sequence[int] | None, kept: SparseWeights) -> Vectors:
    """The weights above zero, by token: of the whole vocabulary, or of a text's `tokens`.

    Of several for one token the largest counts.
    """
    if tokens is not None:
        at = np.asarray(tokens, np.int64)
        table = np.zeros(int(at.max(initial=0)) + 1, np.float32)
        np.maximum.at(table, at, weights)
        weights = table
    ids = np.flatnonzero(weights > 0)
    if kept.without:
        ids = ids[~np.isin(ids, kept.without)]
    if kept.most is not None and len(ids) > kept.most:
        ids = np.sort(ids[np.argsort(-weights[ids], kind="stable")[: kept.most]])
    return Vectors(weights[ids].tobytes(), (len(ids),), ids.astype("<i4").tobytes())
