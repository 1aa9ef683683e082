"""Sequences that a worker writes with guesses and without, and everything it computes for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol
from unittest.mock import patch

from torch import Tensor

from worker.protocol import (
    Encode,
    MediaPlace,
    NewSeq,
    Sampling,
    SeqStep,
    StepInput,
    StepOutput,
    TokenLogprobs,
)
from worker.runner import Runner
from worker.steps.batch import Batch
from worker.steps.compute import Outcome

Draft = Callable[[int, list[int]], list[int]]
"""The type of a function that guesses: from a sequence's number and its output."""


def none(number: int, output: list[int]) -> list[int]:
    return []


@dataclass
class Written:
    """One sequence, and what was told of it."""

    prompt: list[int]
    params: Sampling
    media: tuple[MediaPlace, ...] = ()
    output: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    hidden: list[bytes] = field(default_factory=list[bytes])
    """The bits of the hidden state from which each token was sampled."""
    blocks: list[int] = field(default_factory=list[int])
    """The cache blocks of the first group of layers."""

    @property
    def done(self) -> bool:
        return len(self.output) >= self.params.max_tokens

    @property
    def answer(self) -> tuple[list[int], list[TokenLogprobs], list[bytes]]:
        return self.output, self.logprobs, self.hidden


class Landing(Protocol):
    def result(self) -> StepOutput: ...


class Writer:
    """A minimal engine: all sequences decode in every step, with the guesses of `draft`."""

    steps = 0

    def __init__(
        self,
        launch: Callable[[StepInput], Landing],
        *,
        blocks: int,
        block_size: int,
        groups: int = 1,
        seed: int = 0,
    ) -> None:
        self._launch, self._block_size, self._groups = launch, block_size, groups
        self._free = random.Random(seed).sample(range(blocks), blocks)

    @classmethod
    def of(cls, runner: Runner, seed: int = 0) -> Writer:
        facts = runner.facts
        sizes = {"blocks": facts.num_blocks, "block_size": facts.block_size, "groups": len(facts.windows)}
        return cls(runner.launch, **sizes, seed=seed)

    def write(
        self,
        seqs: Sequence[Written],
        draft: Draft = none,
        *,
        hidden: list[Tensor] | None = None,
        first_slot: int = 0,
        encode: Sequence[Encode] = (),
    ) -> list[Written]:
        """Write all to their ends. `hidden`: where the hidden states of each step are put."""
        new = [
            NewSeq(slot, seq.prompt, len(seq.prompt), seq.params, seq.media)
            for slot, seq in enumerate(seqs, first_slot)
        ]
        while not all(seq.done for seq in seqs):
            rows = [self._row(first_slot + at, at, seq, draft) for at, seq in enumerate(seqs) if not seq.done]
            step = StepInput(self.steps, new, rows, fresh=bool(new), encode=list(encode) if new else [])
            output = self._launch(step).result()
            assert not output.failed
            self._land(seqs, first_slot, rows, output, hidden.pop() if hidden else None)
            new = []
            self.steps += 1
        return list(seqs)

    def _row(self, slot: int, number: int, seq: Written, draft: Draft) -> SeqStep:
        known = len(seq.prompt) + len(seq.output)
        start = known - 1 if seq.output else 0
        guesses = draft(number, seq.output)[: seq.params.max_tokens - len(seq.output) - 1]
        gained = -(-(known + len(guesses)) // self._block_size) - len(seq.blocks)
        each = [[self._free.pop() for _ in range(gained)] for _ in range(self._groups)]
        seq.blocks += each[0]
        blocks = [block for group in each for block in group]
        return SeqStep(slot, start, known - start, blocks, True, len(seq.output), guesses=guesses)

    def _land(
        self,
        seqs: Sequence[Written],
        first_slot: int,
        rows: list[SeqStep],
        output: StepOutput,
        x: Tensor | None,
    ) -> None:
        at = 0
        for index, row in enumerate(rows):
            seq, held = seqs[row.slot - first_slot], output.held.get(row.slot, [])
            assert held == row.guesses[: len(held)]
            if len(held) < len(row.guesses):
                assert output.tokens[index] != row.guesses[len(held)]
            seq.output += [*held, output.tokens[index]]
            if output.logprobs and (last := output.logprobs[index]) is not None:
                seq.logprobs += [*output.held_logprobs.get(row.slot, []), last]
            at += row.count
            if x is not None:
                seq.hidden += [x[at - 1 + each].numpy(force=True).tobytes() for each in range(len(held) + 1)]
            at += len(row.guesses)


@contextmanager
def hidden_of(runner: Runner) -> Iterator[list[Tensor]]:
    """The last hidden states [T, H] of the last step, while it is entered."""
    found: list[Tensor] = []
    finish = runner._finish  # pyright: ignore[reportPrivateUsage]

    def finished(batch: Batch, outcome: Outcome) -> Landing:
        found[:] = [outcome.hidden.float().clone()]
        return finish(batch, outcome)

    with patch.object(runner, "_finish", finished):
        yield found


def write(
    runner: Runner, asked: Sequence[tuple[list[int], Sampling]], draft: Draft = none, seed: int = 0
) -> list[Written]:
    """Write answers to prompts, all in one batch."""
    with hidden_of(runner) as hidden:
        seqs = [Written(prompt, params) for prompt, params in asked]
        return Writer.of(runner, seed).write(seqs, draft, hidden=hidden)


def alone(runner: Runner, asked: Sequence[tuple[list[int], Sampling]]) -> list[Written]:
    """Write answers one after the other, token by token."""
    return [write(runner, [each])[0] for each in asked]


def partly_right(truth: Sequence[Written], plan: Sequence[tuple[int, list[int]]]) -> Draft:
    """Guess, in turns, so many tokens that will hold, and then others."""
    turns = iter(range(1 << 30))

    def draft(number: int, output: list[int]) -> list[int]:
        right, others = plan[next(turns) % len(plan)]
        return [*truth[number].output[len(output) : len(output) + right], *others]

    return draft
