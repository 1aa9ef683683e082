"""What `LLM` answers for texts that are pooled, and how it has its engine pool them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from engine_core.engine import Engine
from engine_core.protocol import Add, Failed
from engine_core.protocol import Pooled as PooledAnswer
from server.errors import ApiError, from_engine
from server.requests.facts import Facts
from server.requests.pooling import Item, PoolingParams, Source, TextReader, Truncation, find_prompt
from server.requests.scoring import Scorer
from server.requests.vectors import Floats, as_array
from server.run.progress import ProgressDisplay
from server.text.tokenizer import Tokenizer
from worker.protocol import Vectors

Form = TypeVar("Form")

_CLIENT = 0


@dataclass(slots=True)
class Embedding:
    embedding: list[float]

    @classmethod
    def of(cls, vectors: Vectors) -> Embedding:
        return cls(as_array(vectors).tolist())


@dataclass(slots=True)
class Classification:
    probs: list[float]
    label: str | None
    """The likeliest; None if the model's files do not name its labels."""

    @classmethod
    def of(cls, vectors: Vectors, labels: Sequence[str]) -> Classification:
        probs: list[float] = as_array(vectors).tolist()
        return cls(probs, labels[probs.index(max(probs))] if labels else None)

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class Pooled:
    data: Floats
    """[D], or a row for each token."""

    @classmethod
    def of(cls, vectors: Vectors) -> Pooled:
        return cls(as_array(vectors))


@dataclass(slots=True)
class Score:
    score: float


@dataclass(slots=True)
class PooledOutput(Generic[Form]):
    outputs: Form
    prompt_token_ids: list[int] = field(default_factory=list[int])
    """Empty for a score, which may be of several prompts."""


class OfflinePooling:
    def __init__(self, engine: Engine, facts: Facts, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._facts = facts
        self._tokenizer = tokenizer

    def pool(
        self,
        sources: Sequence[Source],
        task: str | None,
        *,
        pooling_params: PoolingParams | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: str | None = None,
        use_tqdm: bool = True,
    ) -> list[tuple[Item, Vectors]]:
        """Each text with what became of it, in order. A `task` wins over that of the parameters."""
        asked = pooling_params or PoolingParams()
        params = PoolingParams(
            task=task or asked.task, use_activation=asked.use_activation, dimensions=asked.dimensions
        )
        resolved = params.resolve(self._facts)
        reader = TextReader(
            self._facts,
            self._tokenizer,
            Truncation.asked(truncate_prompt_tokens, truncation_side, self._facts),
            find_prompt(prompt_name, self._facts, resolved.task),
        )
        items = reader.read(sources, resolved)
        return list(zip(items, self._run(items, show=use_tqdm), strict=True))

    def score(self, scorer: Scorer, *, show: bool) -> list[float]:
        items = next(scorer)
        try:
            while True:
                try:
                    answers = self._run(items, show=show)
                except ApiError as error:
                    items = scorer.throw(error)  # it may know a way out
                else:
                    items = scorer.send(answers)
        except StopIteration as end:
            return end.value

    def _run(self, items: Sequence[Item], *, show: bool) -> list[Vectors]:
        for id, item in enumerate(items):
            self._engine.add(_CLIENT, Add(id=id, tokens=item.tokens, params=item.params))
        try:
            answers = self._collect(len(items), ProgressDisplay() if show else None)
        finally:
            self._engine.abort_all()
            while self._engine.busy:
                self._engine.step()
        return [answers[id] for id in range(len(items))]

    def _collect(self, count: int, display: ProgressDisplay | None) -> dict[int, Vectors]:
        answers: dict[int, Vectors] = {}
        while len(answers) < count:
            if display is not None:
                display.show("pool", len(answers) / count)
            for answer in self._engine.step().get(_CLIENT, []):
                if isinstance(answer, Failed):
                    raise from_engine(answer.code, answer.message)
                if isinstance(answer, PooledAnswer):
                    answers[answer.id] = answer.vectors
        if display is not None:
            display.done()
        return answers
