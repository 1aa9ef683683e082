"""Typed questions about one text: the cost of all, beside reading their tokens once, and asking one by one.

    python tests/bench/decisions.py FOLDER [--questions 100] [--state 2000] [--rounds 3] [--alone 8]

FOLDER is a checkpoint, such as tests/bench/checkpoints.py makes. In each round, on a new text: all questions
in one request; a prompt of as many tokens; one new predicate about the text, which is cached by then; some
of the questions one by one at a server without a prefix cache; and all questions about another text beside a
stream, whose gaps are told. Medians of the rounds are printed; a ratio is that of a round.
"""

import argparse
import asyncio
import random
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from commits import Checkout

_WORDS = ("city", "river", "answer", "question", "winter", "water", "house", "market", "school", "garden")
"""Each is one token, as common words are for published models: a question has as many as they would read."""
_CYCLE = 4
"""Questions that follow each other, of which the next ones are alike."""


def _text(drawn: random.Random, words: int) -> str:
    return " ".join(drawn.choice(_WORDS) for _ in range(words))


def _questions(drawn: random.Random, count: int) -> list[dict[str, Any]]:
    """Predicates, choices of four and scores of three levels, in turn; every second one is a predicate."""
    found: list[dict[str, Any]] = []
    for number in range(count):
        asked: dict[str, Any] = {"type": "predicate", "instructions": f"The text is about {_text(drawn, 8)}."}
        options = [f"{each} {_text(drawn, 1)}" for each in drawn.sample(_WORDS, 4)]
        if number % _CYCLE == 1:
            asked |= {"type": "choice", "choices": [{"value": each} for each in options]}
        elif number % _CYCLE == 3:
            asked |= {"type": "score", "levels": [{"label": each} for each in options[:3]]}
        found.append(asked)
    return found


class _Side:
    def __init__(self, folder: str, *flags: str) -> None:
        self.server = Checkout(Path(__file__).parents[2], folder, *flags)
        self.url = f"http://127.0.0.1:{self.server.port}"

    async def post(self, path: str, **body: Any) -> tuple[float, Any]:
        """The seconds until the answer, and the answer."""
        async with httpx.AsyncClient(timeout=1200) as client:
            began = time.perf_counter()
            answer = await client.post(self.url + path, json={"model": "m", **body})
            took = time.perf_counter() - began
        if answer.status_code != 200:
            raise SystemExit(f"{path}: {answer.text}")
        return took, answer.json()

    async def decide(self, text: str, questions: list[dict[str, Any]]) -> tuple[float, int]:
        """The seconds, and the tokens of the text and all questions."""
        took, answer = await self.post("/v1/decisions", input=text, questions=questions)
        return took, answer["usage"]["input_tokens"]

    async def gaps(self, until: asyncio.Event) -> list[float]:
        """The seconds between the tokens of a stream that goes on until the event."""
        body = {"model": "m", "prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        times: list[float] = []
        async with (
            httpx.AsyncClient(timeout=1200) as client,
            client.stream("POST", f"{self.url}/v1/completions", json=body) as response,
        ):
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter())
                if until.is_set():
                    break
        return [later - earlier for earlier, later in pairwise(times)]


async def _round(
    cached: _Side, bare: _Side, given: argparse.Namespace, seed: int, words: int
) -> dict[str, float]:
    """Measures a round of texts of so many words, and prints each part as it ends."""
    drawn, found = random.Random(seed), dict[str, float]()
    text, questions = _text(drawn, words), _questions(drawn, given.questions)

    def note(name: str, value: float) -> float:
        found[name] = value
        print(f"  {name}: {value:.3f}", flush=True)
        return value

    together, tokens = await cached.decide(text, questions)
    note("tokens", tokens)
    note("all questions at once, s", together)
    ids = [drawn.randrange(300, 2000) for _ in range(min(tokens, given.longest))]
    prompt, _ = await bare.post("/v1/completions", prompt=ids, max_tokens=1)
    read = note("as many tokens as one prompt, s", prompt / len(ids) * tokens)
    note("all at once / as one prompt", together / read)
    again = [(await cached.decide(text, [each]))[0] for each in _questions(drawn, 10)[::2]]
    note("one predicate on a cached text, ms", 1000 * statistics.median(again))
    first = _CYCLE * drawn.randrange((given.questions - given.alone) // _CYCLE + 1)
    some = [(await bare.decide(text, [each]))[0] for each in questions[first : first + given.alone]]
    note("one by one / all at once", statistics.mean(some) * len(questions) / together)
    for name, work in (
        ("beside a prompt", cached.post("/v1/completions", prompt=ids, max_tokens=1)),
        ("beside all questions", cached.decide(_text(drawn, words), questions)),
    ):
        over = asyncio.Event()
        stream = asyncio.create_task(cached.gaps(over))
        await asyncio.sleep(1)
        await work
        over.set()
        gaps = sorted(await stream)
        note(f"gap of a stream {name}, p99, ms", 1000 * gaps[int(0.99 * len(gaps))])
    return found


async def _measure(given: argparse.Namespace) -> None:
    cached, bare = _Side(given.folder), _Side(given.folder, "--no-enable-prefix-caching")
    try:
        rounds, sample = list[dict[str, float]](), 1000
        _, told = await bare.post("/tokenize", prompt=_text(random.Random(0), sample))
        words = given.state * sample // told["count"]
        for seed in range(given.rounds):
            rounds.append(await _round(cached, bare, given, seed, words))
        for name in rounds[0]:
            print(f"| {name} | {statistics.median(each[name] for each in rounds):.3f} |")
    finally:
        for side in (cached, bare):
            side.server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--state", type=int, default=2000, help="tokens of the text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--alone",
        type=int,
        default=8,
        help="questions that are asked one by one, of each type as many as in all",
    )
    parser.add_argument("--longest", type=int, default=4096, help="tokens of the prompt that tells the rate")
    asyncio.run(_measure(parser.parse_args()))


if __name__ == "__main__":
    main()
