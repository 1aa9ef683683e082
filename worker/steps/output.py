"""The output of a step: packed into one tensor on the device, unpacked on the host once that has arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from models.pooling.pooler import SparseWeights
from worker.protocol import StepOutput, TokenLogprobs, Vectors
from worker.sampling.logprobs import unpack_logprobs
from worker.steps.batch import Batch, Outcome, PooledRow, PooledVectors

Tell = Callable[[StepOutput], StepOutput]
"""The type of a function that completes an output."""

NOT_FINITE = "the model produced non-finite logits"
NOT_FINITE_VALUES = "the model produced non-finite values"


@dataclass(frozen=True, slots=True)
class Fetch:
    """Values on their way to the host."""

    host: Tensor
    done: torch.cuda.Event | None
    target: torch.device | None = None
    """The device of the event."""

    def wait(self) -> np.ndarray:
        if self.done is not None:
            if self.target is not None:  # a thread that names no device opens a context on the first one
                torch.cuda.set_device(self.target)
            self.done.synchronize()
        return self.host.numpy()


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
    tokens = outcome.tokens
    tables = [*(tokens.logprobs if tokens else []), *outcome.prompt_tables]
    parts = [part.flatten() for part in ([tokens.packed, *tables] if tokens else tables)]
    if pooled.vectors:
        parts.append(torch.cat([vectors.flatten() for vectors in pooled.vectors]).view(torch.int32))
    if not parts:
        parts = [torch.empty(0, dtype=torch.int32, device=device.target)]
    packed = torch.cat(parts) if len(parts) > 1 else parts[0]
    shapes = [(table.shape[0], table.shape[1]) for table in tables]
    vectors = [(row, tuple(vectors.shape)) for row, vectors in zip(pooled.rows, pooled.vectors, strict=True)]
    failed = dict(pooled.failed)
    if tokens is not None and batch.sampled is not None:
        failed |= {batch.sampled.rows[row]: reason for row, reason in tokens.failed.items()}
    compiled = device.kernel_compilations
    return StepHandle(batch, shapes, vectors, failed, compiled, tells, device.fetch(packed))


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A step under way, with all that reading its output needs."""

    _batch: Batch
    _shapes: list[tuple[int, int]]
    _vectors: list[tuple[PooledRow, tuple[int, ...]]]
    """The shape of the vectors of each pooled sequence, of which those of other outputs follow the first."""
    _refused: dict[int, str]
    _compiled: int
    """How many kernels the worker has compiled so far."""
    _tells: Sequence[Tell]
    _fetch: Fetch

    def result(self) -> StepOutput:
        """Wait for the output of this step, but not for later steps."""
        words = self._fetch.wait()
        step, targets = self._batch.step, self._batch.sampled
        seqs, rows = step.seqs, targets.rows if targets else []
        tokens = [-1] * len(seqs)
        failed = {seqs[row].slot: reason for row, reason in self._refused.items()}
        chosen, finite = words[: len(rows)].tolist(), words[len(rows) : 2 * len(rows)].tolist()
        for row, token, good in zip(rows, chosen, finite, strict=True):
            tokens[row] = token if good else -1

        tables = self._tables(words[2 * len(rows) :])
        pooled = self._pooled(words, failed)
        output = StepOutput(
            number=step.number,
            tokens=tokens,
            logprobs=self._logprobs(tables),
            prompt_logprobs={
                wanted.slot: unpack_logprobs(next(tables)) for wanted in self._batch.prompt_logprobs
            },
            failed=failed,
            pooled=pooled,
            kernel_compilations=self._compiled,
        )
        for tell in self._tells:
            output = tell(output)
        if all(finite):
            return output
        sampling = zip(self._batch.asked.seqs, output.tokens, strict=True)
        wrong = {seq.slot: NOT_FINITE for seq, token in sampling if seq.samples and token < 0}
        return msgspec.structs.replace(output, failed=wrong | output.failed)

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
                if row.sparse is not None:
                    vectors = sparse_vectors(numbers, row.tokens, row.sparse)
                else:
                    vectors = Vectors(data=numbers.tobytes(), shape=shape)
                if row.task is None:
                    pooled[slot] = vectors
                else:
                    first = pooled[slot]
                    pooled[slot] = msgspec.structs.replace(first, others={**first.others, row.task: vectors})
        return pooled

    def _logprobs(self, tables: Iterator[np.ndarray]) -> list[TokenLogprobs | None]:
        sampled = self._batch.sampled
        if sampled is None or not sampled.plan.logprobs:
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
