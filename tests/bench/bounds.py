"""The cost of steps that wait for the bounds of their rows: tokens a second with bounds and without.

    python tests/bench/bounds.py FOLDER [--rows 1 8 32] [--tokens 384]

FOLDER is a checkpoint of `checkpoints.py`. One engine, without HTTP, writes answers of equal length. Their
walkers take the time that a grammar of JSON takes for a mask, and are awake in turns: for a few steps none of
them, for a few every second one, for a few all, in an order that changes. So all three meet the same moods of
the machine. The first quartile of the steps of each kind counts, because others can only make them slower,
and the first steps after each change do not.
"""

from __future__ import annotations

import argparse
import time
from itertools import permutations
from math import factorial
from pathlib import Path
from statistics import quantiles

import numpy as np

from engine_core.config import EngineConfig
from engine_core.engine import Engine
from engine_core.protocol import Add
from server.options.reader import assemble
from worker.protocol import Bound, Sampling

PROMPT = 64
MASK_SECONDS = 20e-6
TURN, LEFT_OUT = 10, 3
"""The steps of a turn, and how many of them at its beginning are not counted."""
KINDS = {"none": 0, "half": 2, "all": 1}
"""The name of a turn, and that every so many walkers are awake in it."""


class Turns:
    """Says whose turn it is, by the steps that have landed."""

    def __init__(self) -> None:
        self.steps = 0

    @property
    def kind(self) -> str:
        cycle, turn = divmod(self.steps // TURN, len(KINDS))
        return list(permutations(KINDS))[cycle * 5 % factorial(len(KINDS))][turn]

    @property
    def counted(self) -> bool:
        return self.steps % TURN >= LEFT_OUT


class SteadyWalker:
    """Takes as long for a mask as a grammar does, and allows most tokens or few, as JSON does."""

    def __init__(self, number: int, turns: Turns, masks: list[Bound]) -> None:
        self._number = number
        self._turns = turns
        self._masks = masks
        self._taken = number
        self.complete = False

    def take(self, token: int) -> None:
        self._taken += 1

    @property
    def binds(self) -> bool:
        every = KINDS[self._turns.kind]
        return bool(every) and self._number % every == 0

    def bound(self) -> Bound:
        until = time.perf_counter() + MASK_SECONDS
        while time.perf_counter() < until:
            pass
        return self._masks[self._taken % len(self._masks)]


def make_masks(vocab_size: int) -> list[Bound]:
    """Masks as in a string, where nearly all tokens may come, and as behind one, where few may."""
    rng = np.random.default_rng(0)
    words = -(-vocab_size // 32) * 32
    shares = (0.97, 0.97, 0.97, 0.01)
    return [
        Bound("bits", np.packbits(rng.random(words) < share, bitorder="little").tobytes()) for share in shares
    ]


def step_seconds(engine: Engine, rows: int, tokens: int, masks: list[Bound]) -> dict[str, list[float]]:
    """The times of steps in which so many sequences get a token each, by the kind of their turn."""
    rng, turns = np.random.default_rng(rows), Turns()
    for id in range(rows):
        prompt = rng.integers(5, 30_000, PROMPT).tolist()
        params = Sampling(max_tokens=tokens, temperature=1.0, seed=id)
        engine.add(0, Add(id, prompt, params), SteadyWalker(id, turns, masks))
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    before = time.perf_counter()
    while engine.busy:
        if len(engine.step().get(0, [])) == rows:
            now = time.perf_counter()
            if turns.counted:
                found[turns.kind].append(now - before)
            before = now
            turns.steps += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=384)
    asked = parser.parse_args()
    given = {"model": str(asked.folder), "max_model_len": 1024, "enable_prefix_caching": False}
    engine = Engine.start(assemble(EngineConfig, given), lambda _: None)
    try:
        for rows in asked.rows:
            found = step_seconds(engine, rows, asked.tokens, make_masks(engine.ready.vocab_size))
            rates = {kind: rows / quantiles(times)[0] for kind, times in found.items()}
            told = ", ".join(
                f"{kind} {rate:.1f} ({rate / rates['none']:.3f})" for kind, rate in rates.items()
            )
            print(f"{rows} rows, tokens a second: {told}", flush=True)
    finally:
        engine.stop()


if __name__ == "__main__":
    main()
