"""Engines with a drafter that is asked for guesses at random, and what it guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from driven import run
from sizes import engine_config
from tiny import VOCAB_SIZE

from engine_core.engine import Engine
from engine_core.features.speculation.model_speculator import ModelSpeculator
from engine_core.protocol import AddRequest, Tokens
from engine_core.scheduling.sequence import Sequence
from worker.protocol import Sampling, TokenLogprobs

MOST = 5
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 4,
    "num_gpu_blocks_override": 26,
    "max_model_len": 80,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_token_gap_ms": 0.0,
    "cpu_threads": 1,
}
"""Options of small engines, in which prompts are cut and sequences are preempted. No step is bound in
time, or a slow machine would leave no room for guesses."""


@dataclass
class Drafted:
    """What a drafter has guessed: the known tokens of a sequence, and the guesses behind them."""

    drafts: list[tuple[list[int], list[int]]] = field(default_factory=list)


@contextmanager
def asked_at_random(random: Random) -> Iterator[Drafted]:
    """Let engines ask drafters for up to MOST guesses, whatever pays, and note these."""
    drafted, offer = Drafted(), ModelSpeculator.offer
    chosen: dict[tuple[int, ...], dict[Sequence, int]] = {}

    def lengths(self: ModelSpeculator, seqs: list[Sequence]) -> dict[Sequence, int]:
        """The same while no token lands: it is asked twice."""
        key = tuple(len(seq.tokens) for seq in seqs)
        if key not in chosen:
            chosen[key] = {seq: random.randint(0, MOST) for seq in seqs if seq in self._drafted}
        return {seq: count for seq, count in chosen[key].items() if count and seq in seqs}

    def offered(self: ModelSpeculator, seq: Sequence, guesses: list[int]) -> None:
        drafted.drafts.append((list(seq.tokens), list(guesses)))
        offer(self, seq, guesses)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelSpeculator, "lengths", lengths)
        patch.setattr(ModelSpeculator, "offer", offered)
        yield drafted


def requests(random: Random, **options: Any) -> list[AddRequest]:
    """Prompts in chunks, some of which begin alike; together they have no room in the cache."""
    shared = [random.randrange(3, VOCAB_SIZE) for _ in range(24)]
    prompts = [shared[: random.choice((0, 8, 24))] for _ in range(8)]
    return [
        AddRequest(
            id=id,
            tokens=prompt + [random.randrange(3, VOCAB_SIZE) for _ in range(random.randint(1, 12))],
            params=Sampling(max_tokens=random.randint(10, 40), logprobs=2, **(options or {"temperature": 0})),
        )
        for id, prompt in enumerate(prompts)
    ]


@contextmanager
def opened(model: Path, drafter: Path | None = None, make: Any = None, **options: Any) -> Iterator[Engine]:
    """An engine of a model, with a drafter or without."""
    asked = {} if drafter is None else {"method": "draft_model", "model": str(drafter)}
    if drafter is not None:
        options["speculative_config"] = {**asked, **options.pop("drafting", {})}
    engine = Engine.start(engine_config(model, **options), lambda _: None, make)
    try:
        yield engine
    finally:
        engine.stop()


Answer = tuple[list[int], list[TokenLogprobs]]


def answer(
    engine: Engine, requests: list[AddRequest], between: Callable[[], object] | None = None
) -> list[Answer]:
    """The tokens and logprobs of requests that come one after the other, while those before them run."""
    told: dict[int, list[Any]] = {}
    for request in requests:
        engine.add(0, request)
        for _ in range(2):
            for output in engine.step().get(0, []):
                told.setdefault(output.id, []).append(output)
    for id, outputs in run(engine).items():
        told.setdefault(id, []).extend(outputs)
    answers: list[Answer] = []
    for request in requests:
        parts = [each for each in told[request.id] if isinstance(each, Tokens)]
        assert parts[-1].finish
        answers.append(
            ([t for each in parts for t in each.tokens], [e for each in parts for e in each.logprobs])
        )
    return answers


def greedy_by(oracle: Any, tokens: list[int], count: int) -> list[int]:
    """The tokens that transformers' model writes behind these, the likeliest each time."""
    written = list(tokens)
    with torch.no_grad():
        for _ in range(count):
            logits = oracle(torch.tensor([written])).logits[0, -1]
            written.append(int(logits.argmax()))
    return written[len(tokens) :]
