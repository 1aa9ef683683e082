"""The cost of steps that wait for the bounds of their rows: tokens a second with bounds and without.

    python tests/bench/bounds.py FOLDER [--rows 1 8 32] [--tokens 384] [--json]

FOLDER is a checkpoint of `checkpoints.py`. One engine, without HTTP, writes answers of equal length. Their
matchers take 20 us for a mask, or with `--json` follow a long list of objects, and are awake in turns: for a
few steps none of them, for a few every second one, for a few all, in an order that changes. So all three
meet the same moods of the machine. The first quartile of the steps of each kind counts, because others can
only make them slower, and the first steps after each change do not.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable
from itertools import permutations
from math import factorial
from pathlib import Path
from statistics import quantiles

import numpy as np

from engine_core.config import EngineConfig
from engine_core.engine import Engine
from engine_core.grammar.compiler import GrammarCompiler
from engine_core.grammar.matcher import TokenMatcher
from engine_core.protocol import Add, Grammar
from server.options.option_table import assemble
from server.text.tokenizer_files import TokenizerFiles
from worker.protocol import Bound, Sampling

PROMPT = 64
MASK_SECONDS = 20e-6
TURN, LEFT_OUT = 10, 3
"""The steps of a turn, and how many of them at its beginning are not counted."""
KINDS = {"none": 0, "half": 2, "all": 1}
"""The name of a turn, and that every so many matchers are awake in it."""

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["name", "age", "tags"],
}
"""What the answers of `--json` list."""


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


class SteadyMatcher:
    """Takes the same time for every mask, and allows most tokens or few, as JSON does."""

    complete = False
    binds = True

    def __init__(self, masks: list[Bound]) -> None:
        self._masks = masks
        self._taken = 0

    def take(self, token: int, *, wakes: bool = True) -> None:
        self._taken += 1

    def bound(self) -> Bound:
        until = time.perf_counter() + MASK_SECONDS
        while time.perf_counter() < until:
            pass
        return self._masks[self._taken % len(self._masks)]


class MatcherInTurns:
    """Lets a matcher take only the tokens that were sampled in its turns."""

    complete = False

    def __init__(self, number: int, turns: Turns, matcher: TokenMatcher) -> None:
        self._number = number
        self._turns = turns
        self._matcher = matcher
        self._planned: deque[bool] = deque()
        """Whether each token that has not come yet is bound."""

    def take(self, token: int, *, wakes: bool = True) -> None:
        if self._planned.popleft():
            self._matcher.take(token, wakes=wakes)

    def bound(self) -> Bound | None:
        return self._matcher.bound()

    @property
    def binds(self) -> bool:
        every = KINDS[self._turns.kind]
        self._planned.append(bool(every) and self._number % every == 0)
        return self._planned[-1]


def json_matchers(folder: Path, vocab_size: int) -> Callable[[], TokenMatcher]:
    """A function that makes matchers of a JSON schema which no answer comes to the end of."""
    tokenizer = TokenizerFiles(str(folder), "").load()
    compiler = GrammarCompiler(tokenizer.spelling([]), vocab_size, str(folder), lambda: None)
    grammar = Grammar("json", json.dumps({"type": "array", "items": ITEM, "minItems": 1000}))
    compiled = compiler.compile(grammar).result()
    compiler.stop()
    return lambda: compiler.matcher(compiled, grammar)


def make_masks(vocab_size: int) -> list[Bound]:
    """Masks as in a string, where nearly all tokens may come, and as behind one, where few may."""
    rng = np.random.default_rng(0)
    words = -(-vocab_size // 32) * 32
    shares = (0.97, 0.97, 0.97, 0.01)
    return [
        Bound("bits", np.packbits(rng.random(words) < share, bitorder="little").tobytes()) for share in shares
    ]


def step_seconds(
    engine: Engine, rows: int, tokens: int, matcher: Callable[[], TokenMatcher]
) -> dict[str, list[float]]:
    """The times of steps in which so many sequences get a token each, by the kind of their turn."""
    rng, turns = np.random.default_rng(rows), Turns()
    for id in range(rows):
        prompt = rng.integers(5, 30_000, PROMPT).tolist()
        params = Sampling(max_tokens=tokens, temperature=1.0, seed=id)
        engine.add(0, Add(id, prompt, params), MatcherInTurns(id, turns, matcher()))
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
    parser = argparse.ArgumentParser(description="Measure what bounds cost.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    given = {"model": str(asked.folder), "max_model_len": 1024, "enable_prefix_caching": False}
    engine = Engine.start(assemble(EngineConfig, given), lambda _: None)
    vocab_size = engine.ready.vocab_size
    masks = make_masks(vocab_size)
    matcher = json_matchers(asked.folder, vocab_size) if asked.json else lambda: SteadyMatcher(masks)
    try:
        for rows in asked.rows:
            found = step_seconds(engine, rows, asked.tokens, matcher)
            rates = {kind: rows / quantiles(times)[0] for kind, times in found.items()}
            told = ", ".join(
                f"{kind} {rate:.1f} ({rate / rates['none']:.3f})" for kind, rate in rates.items()
            )
            print(f"{rows} rows, tokens a second: {told}", flush=True)
    finally:
        engine.stop()


if __name__ == "__main__":
    main()
