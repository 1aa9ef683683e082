"""Random requests with their true results: each is computed alone, in one chunk, with nothing cached.

Conversations go on from their own outputs, so the truth of one turn is needed to write the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

from bits_subjects import MAX_LEN, VOCABULARY, Subject
from msgspec import structs

from engine_core.engine import Engine
from engine_core.protocol import AddRequest, Admitted, Failed, Pooled, Tokens
from worker.protocol import Pooling, Sampling, TokenLogprobs, Vectors

PREFIXES = (30, 150, 300, 530)
"""The tokens of prefixes that prompts share; those of attention's borders are among them."""
MOST_TURNS = 3


@dataclass
class Result:
    """Everything that an engine says about a request, but for its times."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    prompt_logprobs: list[TokenLogprobs] | None = None
    vectors: Vectors | None = None
    finish: str | None = None

    def take(self, answer: Admitted | Tokens | Pooled | Failed) -> bool:
        """Add an answer; returns whether it is the last."""
        match answer:
            case Failed():
                self.finish = f"failed: {answer.message}"
            case Pooled():
                self.vectors, self.finish = answer.vectors, "pooled"
            case Tokens():
                self.tokens += answer.tokens
                self.logprobs += answer.logprobs
                if answer.prompt_logprobs is not None:
                    self.prompt_logprobs = answer.prompt_logprobs
                self.finish = answer.finish
            case Admitted():
                pass
        return self.finish is not None


@dataclass(frozen=True)
class Turn:
    """A request and its true result."""

    prompt: list[int]
    params: Sampling | Pooling
    truth: Result

    @property
    def most_tokens(self) -> int:
        return len(self.prompt) + (self.params.max_tokens if isinstance(self.params, Sampling) else 1)


Conversation = list[Turn]
"""Requests of which each begins with the tokens of the one before and its output."""


def answers(engine: Engine, requests: Iterable[AddRequest]) -> dict[int, Result]:
    """The results of requests that come at the same time, by id."""
    results: dict[int, Result] = {}
    for request in requests:
        results[request.id] = Result()
        engine.add(0, request)
    while engine.busy:
        for answer in engine.step().get(0, []):
            results[answer.id].take(answer)
    return results


def write_traffic(random: Random, subject: Subject, count: int, engine: Engine) -> list[Conversation]:
    """Some conversations and texts to pool for a model; `engine` computes one request at a time."""
    prefixes = [_text(random, length) for length in PREFIXES]
    conversations: list[Conversation] = []
    for _ in range(count):
        choice = random.random() if subject.generates else 1.0
        if choice < 0.5:
            conversations.append(_converse(random, subject, prefixes, engine))
        elif choice < 0.6:
            conversations += _choices(random, prefixes, engine)
        else:
            prompt = _prompt(random, prefixes)
            conversations.append([_turn(engine, prompt, _pooling(random, subject, len(prompt)))])
    return conversations


def _converse(random: Random, subject: Subject, prefixes: list[list[int]], engine: Engine) -> Conversation:
    """A prompt and its further turns; at its end, all of it may be pooled, or asked again."""
    turns: Conversation = []
    prompt = _prompt(random, prefixes)
    for _ in range(random.randint(1, MOST_TURNS)):
        turns.append(_turn(engine, prompt, _sampling(random, len(prompt))))
        prompt = prompt + turns[-1].truth.tokens + _text(random, random.randint(1, 30))
        if len(prompt) > MAX_LEN - 40:
            break
    if random.random() < 0.3:
        turns.append(_turn(engine, turns[-1].prompt, _pooling(random, subject, len(turns[-1].prompt))))
    if random.random() < 0.3:
        turns.append(turns[0])
    return turns


def _choices(random: Random, prefixes: list[list[int]], engine: Engine) -> list[Conversation]:
    """Several choices for one prompt, which differ in the seed of their draws alone."""
    prompt = _prompt(random, prefixes)
    params = structs.replace(_sampling(random, len(prompt)), temperature=1.0)
    return [[_turn(engine, prompt, structs.replace(params, seed=seed))] for seed in range(3)]


def _turn(engine: Engine, prompt: list[int], params: Sampling | Pooling) -> Turn:
    truth = answers(engine, [AddRequest(id=0, tokens=prompt, params=params)])[0]
    if truth.vectors is None and not truth.tokens:
        raise ValueError(f"{params} of {len(prompt)} tokens {truth.finish}")
    return Turn(prompt, params, truth)


def _text(random: Random, length: int) -> list[int]:
    return random.choices(range(5, VOCABULARY), k=length)


def _prompt(random: Random, prefixes: list[list[int]]) -> list[int]:
    prefix = random.choice(prefixes) if random.random() < 0.6 else []
    return prefix + _text(random, random.choice((1, 2, 7, 16, 33, 64, 120)))


def _sampling(random: Random, length: int) -> Sampling:
    """Options as the server resolves them; most requests ask for logprobs, because tokens show too little."""
    longest = 150 if length < 100 and random.random() < 0.3 else min(40, MAX_LEN - length)
    options: dict[str, object] = {"temperature": random.choice((0.0, 0.0, 0.8, 1.5))}
    for name, value in _OPTIONS.items():
        if random.random() < 0.2:
            options[name] = value(random)
    if random.random() < 0.85:
        options["logprobs"] = random.choice((0, 2, 2, 2, 20, -1))
    if random.random() < 0.15:
        options["prompt_logprobs"] = random.choice((0, 2))
    least = random.randint(1, min(5, longest))
    max_tokens = random.randint(least, longest)
    if random.random() < 0.2:
        options["min_tokens"] = least
    return Sampling(max_tokens=max_tokens, seed=random.randrange(1 << 40), **options)  # pyright: ignore


def _pooling(random: Random, subject: Subject, length: int) -> Pooling:
    task = random.choice(subject.tasks)
    return Pooling(
        task=task,
        use_activation=random.choice((None, True, False)),
        dimensions=None if "classify" in task else random.choice((None, None, 24)),
        skip=0 if task != "embed" else min(length, random.choice((0, 0, 5))),
    )


_OPTIONS: dict[str, Callable[[Random], object]] = {
    "top_p": lambda random: random.choice((0.3, 0.9, 0.99)),
    "top_k": lambda random: random.choice((1, 5, 50)),
    "min_p": lambda random: random.choice((0.01, 0.2)),
    "presence_penalty": lambda random: 0.7,
    "frequency_penalty": lambda random: 0.3,
    "repetition_penalty": lambda random: 1.3,
    "stop_token_ids": lambda random: tuple(_text(random, 100)),
    "logit_bias": lambda random: {token: random.choice((-5.0, 4.0)) for token in _text(random, 9)},
    "bad_words": lambda random: tuple((token,) for token in _text(random, 30)),
    "allowed_token_ids": lambda random: tuple(sorted(set(_text(random, 60)))),
}
"""Functions that choose the value of an option."""
