"""Beam search for tests: what may follow in a worker without tensors, and a plain search without a cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any
from zlib import crc32

from fake_cache import FakeCache, sum_up
from fake_media import FakeMedia
from fake_states import FakeStates

from engine_core.beams.beam_params import Beam, BeamParams
from engine_core.scheduling.sequence import Sequence
from worker.protocol import BeamToken, SeqStep, TokenLogprobs

Likely = Callable[[list[int], int], Iterable[tuple[int, float]]]
"""The type of a function that tells so many tokens that may follow others, and their logprobs, falling."""


def likeliest(total: int, count: int, vocab: int = 50) -> TokenLogprobs:
    """What may follow tokens that are summed up in a number, in the form of a worker."""
    values = {token: -(crc32(b"%d %d" % (total, token)) % 100_003) / 20_000 for token in range(vocab)}
    ids = sorted(values, key=lambda token: -values[token])[:count]
    return TokenLogprobs([ids[0], *ids], [values[ids[0]], *(values[token] for token in ids)], 1)


def likely_after(seq: SeqStep, row: Any, cache: FakeCache, states: FakeStates | None) -> TokenLogprobs | None:
    """What may follow a row of a worker without tensors, if it asks for logprobs."""
    if not (seq.samples and row.logprobs):
        return None
    entries = cache.seen(seq, row.tokens)
    state = states.of_slots[seq.slot] - (entries[-1] or 0) if states is not None else 0
    return likeliest(sum_up(entries) + state, row.logprobs)


def search(
    likely: Likely, prompt: list[int], params: BeamParams, max_tokens: int, stops: Collection[int]
) -> list[tuple[list[int], float, str]]:
    """The answers of vLLM's beam search: tokens, the sum of their logprobs, and why each ended."""
    live: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float]] = []
    for _ in range(max_tokens):
        found: list[tuple[list[int], float]] = []
        for tokens, total in live:
            for token, value in likely([*prompt, *tokens], 2 * params.width):
                (ended if token in stops else found).append(([*tokens, token], total + value))
        live = sorted(found, key=lambda each: each[1], reverse=True)[: params.width]
        if params.early_stopping and len(ended) >= params.width:
            live = []
        if not live:
            break
    every = [(*each, "stop") for each in ended] + [(*each, "length") for each in live]

    def score(each: tuple[list[int], float, str]) -> float:
        tokens, total, finish = each
        length = len(prompt) + len(tokens) - (finish == "stop")
        return total / length**params.length_penalty

    return sorted(every, key=score, reverse=True)[: params.answers]


def told(beams: list[Beam]) -> list[tuple[list[int], float, str]]:
    return [(beam.tokens, beam.total, beam.finish) for beam in beams]


def fork_rows(
    beams: list[BeamToken],
    rows: dict[int, Any],
    cache: FakeCache,
    media: FakeMedia,
    states: FakeStates | None,
) -> None:
    """Let slots go on as beams say, all at the same time."""
    new = {beam.slot: [*rows[beam.source].tokens[: beam.at], beam.token] for beam in beams}
    if any(len(new[beam.slot]) != beam.at + 1 for beam in beams):
        raise ValueError("an answer goes on where its source has no token yet")
    rows.update({beam.slot: replace(rows[beam.source], tokens=new[beam.slot]) for beam in beams})
    cache.fork(beams)
    media.fork(beams)
    if states is not None:
        states.of_slots.update({beam.slot: states.of_slots[beam.source] for beam in beams})


def held_by(seq: Sequence) -> tuple[list[int | None], list[list[int]]]:
    """The slots and the tables of blocks that a running sequence holds."""
    if seq.search is None or not seq.search.beams:
        spare = [] if seq.search is None else seq.search.spare_slots
        return [seq.slot, *spare], seq.tables
    slots = [*(beam.slot for beam in seq.search.beams), *seq.search.spare_slots]
    return slots, [table for beam in seq.search.beams for table in beam.tables]
