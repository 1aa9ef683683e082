"""What a step answers: packed into one tensor on the device, unpacked on the host once that has arrived."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from worker.batch import Batch
from worker.devices.base import Device, Fetch
from worker.pooling.plan import Pooled
from worker.protocol import StepInput, StepOutput, TokenLogprobs, Vectors
from worker.sampling.logprobs import read
from worker.sampling.sampler import Choice

NOT_FINITE = "the model produced non-finite logits"
NOT_FINITE_VALUES = "the model produced non-finite values"


def send_back(
    device: Device,
    step: StepInput,
    batch: Batch,
    choice: Choice | None,
    prompt_tables: list[Tensor],
    pooled: Pooled,
) -> Handle:
    """Start the one copy out. The handle keeps what it needs: rows may belong to others when it is read."""
    tables = [*(choice.logprobs if choice else []), *prompt_tables]
    parts = [choice.told.flatten()] if choice else []
    parts += [table.flatten() for table in tables]
    if pooled.vectors:
        parts.append(torch.cat([vectors.flatten() for vectors in pooled.vectors]).view(torch.int32))
    if not parts:
        parts = [torch.empty(0, dtype=torch.int32, device=device.target)]
    packed = torch.cat(parts) if len(parts) > 1 else parts[0]
    shapes = [(table.shape[0], table.shape[1]) for table in tables]
    answers = [(row, tuple(vectors.shape)) for row, vectors in zip(pooled.rows, pooled.vectors, strict=True)]
    return Handle(step, batch, shapes, answers, pooled.failed, device.fetch(packed))


@dataclass(frozen=True, slots=True)
class Handle:
    """A step under way."""

    _step: StepInput
    _batch: Batch
    _shapes: list[tuple[int, int]]
    _answers: list[tuple[int, tuple[int, ...]]]
    """Of pooled sequences: place in StepInput.seqs, and shape."""
    _refused: dict[int, str]
    _fetch: Fetch

    def result(self) -> StepOutput:
        """Waits for this step's own answer, not for later steps."""
        words = self._fetch.wait()
        sampled = self._batch.sampled
        seqs = self._step.seqs
        rows = sampled.rows if sampled else []
        tokens = [-1] * len(seqs)
        failed = {seqs[row].slot: reason for row, reason in self._refused.items()}
        chosen, finite = words[: len(rows)].tolist(), words[len(rows) : 2 * len(rows)].tolist()
        for row, token, good in zip(rows, chosen, finite, strict=True):
            if good:
                tokens[row] = token
            else:
                failed[seqs[row].slot] = NOT_FINITE

        tables = self._tables(words[2 * len(rows) :])
        pooled = self._pooled(words, failed)
        return StepOutput(
            number=self._step.number,
            tokens=tokens,
            logprobs=self._logprobs(tables),
            prompt_logprobs={wanted.slot: read(next(tables)) for wanted in self._batch.prompts},
            failed=failed,
            pooled=pooled,
        )

    def _tables(self, words: np.ndarray) -> Iterator[np.ndarray]:
        start = 0
        for rows, width in self._shapes:
            yield words[start : start + rows * width].reshape(rows, width)
            start += rows * width

    def _pooled(self, words: np.ndarray, failed: dict[int, str]) -> dict[int, Vectors]:
        """They are the last words. One that is not finite fails its own sequence."""
        pooled: dict[int, Vectors] = {}
        start = len(words) - sum(prod(shape) for _, shape in self._answers)
        all_finite = np.isfinite(words[start:].view(np.float32)).all()
        for row, shape in self._answers:
            stop = start + prod(shape)
            numbers = words[start:stop].view(np.float32)
            slot = self._step.seqs[row].slot
            if all_finite or np.isfinite(numbers).all():
                pooled[slot] = Vectors(data=numbers.tobytes(), shape=shape)
            else:
                failed[slot] = NOT_FINITE_VALUES
            start = stop
        return pooled

    def _logprobs(self, tables: Iterator[np.ndarray]) -> list[TokenLogprobs | None]:
        sampled = self._batch.sampled
        if sampled is None or not sampled.plan.logprobs:
            return []
        entries: list[TokenLogprobs | None] = [None] * len(self._step.seqs)
        for wanted in sampled.plan.logprobs:
            for row, entry in zip(wanted.rows_host, read(next(tables)), strict=True):
                entries[sampled.rows[row]] = entry
        return entries
