"""What guesses cost and gain: tokens a second with them beside those without, for the same requests."""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dummy import Dummy, opened
from results import Result
from scheduled import Loop
from shapes import shallow
from workbench import Part, Workbench

from engine_core.features.speculation.drafts import Drafts
from engine_core.protocol import AddRequest
from models.config import read_config
from models.conversion.conversion_choice import Conversion
from worker.config import DrafterConfig
from worker.protocol import Sampling

_LENGTH, _OUTPUT = 256, 192
_METHODS: dict[str, dict[str, Any] | None] = {
    "without": None,
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
}


def _requests(bench: Workbench, rows: int, first: int, *, drawn: bool) -> list[AddRequest]:
    """Prompts of random tokens. Drawn answers are random, too; greedy ones soon repeat themselves."""
    chance = random.Random(first)
    params = Sampling(max_tokens=bench.size(_OUTPUT, 6), temperature=float(drawn), seed=1)
    prompts = [[chance.randrange(3, 2000) for _ in range(bench.tokens(_LENGTH))] for _ in range(rows)]
    return [
        AddRequest(id=first + number, tokens=prompt, params=params) for number, prompt in enumerate(prompts)
    ]


def _rate(
    dummy: Dummy, asked: dict[str, Any] | None, rows: int, *, drawn: bool
) -> tuple[float, list[list[int]], str]:
    """The tokens a second of so many requests at once, behind a first round; their tokens; what held."""
    loop = Loop(dummy.runner.launch, dummy.facts, dummy.shape.vocabulary, speculative_config=asked)
    took, answers = 0.0, list[list[int]]()
    for turn in range(2):
        loop.scheduler.cache.pool.withdraw_all()
        requests = _requests(dummy.bench, rows, 1000 * turn, drawn=drawn)
        began = time.perf_counter()
        answers = loop.run(requests)
        took = time.perf_counter() - began
    drafts = loop.scheduler.hooks.find(Drafts)
    totals = None if drafts is None else drafts.totals
    held = f"{sum(totals.held)} of {totals.guessed} guesses held" if totals else ""
    return sum(map(len, answers)) / took, answers, held


def measure_text(bench: Workbench, name: str) -> Iterator[Result]:
    """Guesses from text, for answers that repeat themselves and for random ones."""
    rows = bench.size(32, 2)
    with opened(bench, bench.shape(name), rows=rows, longest=bench.tokens(512) + 8) as dummy:
        dummy.make_graphs(whole_only=False)
        for kind in ("greedy", "drawn"):
            for count in bench.some((1, 8, 32)):
                before, expected = 0.0, list[list[int]]()
                for method, asked in _METHODS.items():
                    rate, answers, held = _rate(dummy, asked, min(count, rows), drawn=kind == "drawn")
                    before, expected = before or rate, expected or answers
                    same = sum(one == other for one, other in zip(answers, expected, strict=True))
                    told = f"{rate / before:.2f} times; {held}; {same} answers are the same" if asked else ""
                    yield Result(f"{name} {kind} by {count}, {method}", told, rate, "tok/s")


def measure_drafter(bench: Workbench, name: str) -> Iterator[Result]:
    """A drafter of an eighth of the layers, whose guesses hold by chance, 0.8 of the first and so on."""
    shape = bench.shape(name)
    small = shallow(shape, max(1, shape.layers // 8))
    folder = small.write(Path(bench.folder) / f"drafter of {name}")
    model = read_config(folder)
    rates = tuple(0.8**at for at in range(1, 5))
    whole = Conversion(runner="generate", convert="none", architecture=model.architecture)
    drafter = DrafterConfig(
        folder=str(folder), model=model, conversion=whole, method="draft_model", most=4, rates=rates
    )
    asked = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 4}
    rows = bench.size(8, 2)
    before: dict[int, float] = {}
    for given in (None, drafter):
        sizes: dict[str, Any] = {"rows": rows, "longest": bench.tokens(512) + 8}
        with opened(bench, shape, drafter=given, **sizes) as dummy:
            dummy.make_graphs(whole_only=False)
            for count in bench.some((1, 8)):
                rate, _, held = _rate(dummy, asked if given else None, min(count, rows), drawn=True)
                told = f"{rate / before[count]:.2f} times; {held}" if given else ""
                before.setdefault(count, rate)
                how = f"a drafter of {small.layers} layers" if given else "without"
                yield Result(f"{name} by {count}, {how}", told, rate, "tok/s")


PARTS = (
    Part("0.6B", lambda bench: measure_text(bench, "0.6B"), 45),
    Part("8B with a drafter", lambda bench: measure_drafter(bench, "8B"), 90),
)
