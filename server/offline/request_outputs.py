"""The outputs of `LLM`, `LLMEngine` and `AsyncLLM`: vLLM's classes and fields, where they have a value."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine_core.protocol import Pooled
from server.errors import ApiError
from server.requests.timing import EngineTimes
from server.requests.vectors import Floats, as_array
from worker.protocol import Vectors

Form = TypeVar("Form")
Result = TypeVar("Result")


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None
    """Rank among the whole vocabulary; 1 is the most likely token."""
    decoded_token: str | None = None
    """The text of the token; None if the request asked for no text."""


LogprobsByToken = dict[int, Logprob]
"""Logprobs at one position by token id: the chosen token first, then the most likely ones."""


@dataclass(slots=True)
class CompletionOutput:
    """One of the n answers to a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    cumulative_logprob: float | None = None
    """The sum over all tokens so far; None if no logprobs were asked for."""
    logprobs: list[LogprobsByToken] | None = None
    """One dictionary for each token, if asked for."""
    finish_reason: str | None = None
    """ "stop", "length", "abort" or "error"; None while the answer goes on."""
    stop_reason: int | str | None = None
    """The stop string or stop token that ended the answer; None for an end-of-sequence token."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics(EngineTimes):
    """The times of a request. Fields that end in `_ts` are of the monotonic clock; 0.0 is unknown.

    Those that end in `_time` are seconds, known once the request has ended.
    """

    arrival_time: float = field(default_factory=time.time)
    """Seconds since 1970."""
    queued_ts: float = field(default_factory=time.monotonic)
    scheduled_ts: float = 0.0
    """Start of the first step; known once the request has ended."""
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_generation_tokens: int = 0

    @property
    def first_token_latency(self) -> float:
        return self.first_token_ts - self.queued_ts if self.first_token_ts else 0.0

    @property
    def time_in_queue(self) -> float | None:
        return self.scheduled_ts - self.queued_ts if self.scheduled_ts else None

    @property
    def first_scheduled_time(self) -> float | None:
        return self._since_1970(self.scheduled_ts)

    @property
    def first_token_time(self) -> float | None:
        return self._since_1970(self.first_token_ts)

    @property
    def last_token_time(self) -> float | None:
        return self._since_1970(self.last_token_ts)

    def add_pooled(self, answer: Pooled) -> None:
        """Take the times of the request's one text."""
        self.add_round([answer])
        if answer.timing is not None:
            self.scheduled_ts = self.queued_ts + answer.timing.queued

    def _since_1970(self, moment: float) -> float | None:
        return self.arrival_time + moment - self.queued_ts if moment else None


@dataclass(slots=True)
class RequestOutput:
    """The answers to one prompt, so far or whole."""

    request_id: str
    prompt: str | None
    """None if the prompt was given as token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobsByToken | None] | None = None
    """One dictionary for each prompt token but the first, if asked for; the first entry is None."""
    outputs: list[CompletionOutput] = field(default_factory=list[CompletionOutput])
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; None while that is unknown."""
    error: ApiError | None = None
    """The reason why the engine could not finish the request. `LLM` and `AsyncLLM` raise it."""


@dataclass(slots=True)
class BeamSearchSequence:
    """One of the answers that a beam search has found."""

    tokens: list[int]
    """The prompt and the answer, the stop token included."""
    logprobs: list[LogprobsByToken]
    """One dictionary for each token of the answer."""
    cum_logprob: float = 0.0
    text: str | None = None
    """The text of the prompt and of the answer."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop token, if one ended the answer."""


@dataclass(slots=True)
class BeamSearchOutput:
    """The answers that a beam search has found to one prompt, the best one first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list[BeamSearchSequence])
    request_id: str = ""
    finished: bool = True
    error: ApiError | None = None
    """The reason why the engine could not finish the request. `LLM` raises it."""


@dataclass(slots=True)
class PoolingOutput:
    data: Floats
    """[D], or a row for each token; of a sparse vector [K], the weights of `ids`."""
    ids: NDArray[np.int32] | None = None
    """The tokens of a sparse vector, rising."""
    others: dict[str, PoolingOutput] = field(default_factory=dict[str, "PoolingOutput"])
    """What answers the other tasks of `PoolingParams.outputs`, by task."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PoolingOutput):
            return NotImplemented
        if self.ids is None or other.ids is None:
            same_ids = self.ids is other.ids
        else:
            same_ids = np.array_equal(self.ids, other.ids)
        return same_ids and np.array_equal(self.data, other.data) and self.others == other.others

    @classmethod
    def of(cls, vectors: Vectors) -> PoolingOutput:
        """A copy, which can be written to and made a tensor."""
        ids = np.frombuffer(vectors.ids, "<i4").copy() if vectors.ids else None
        others = {task: cls.of(each) for task, each in vectors.others.items()}
        return cls(as_array(vectors).copy(), ids, others)


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    probs: list[float]
    label: str | None = None
    """The likeliest label; None if the model's files name none."""

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    score: float


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Form]):
    """The result of pooling one text."""

    request_id: str
    outputs: Form
    prompt_token_ids: list[int] = field(default_factory=list[int])
    """Empty for a score that was computed from several prompts."""
    num_cached_tokens: int = 0
    finished: bool = True
    error: ApiError | None = None
    """The reason why the engine could not finish the request; `outputs.data` is empty then."""
    metrics: RequestMetrics | None = None
    """None for a score that was computed from several prompts."""


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    pass


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    pass


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    pass


def embedding_output(pooled: PoolingRequestOutput[PoolingOutput]) -> EmbeddingRequestOutput:
    return with_form(EmbeddingRequestOutput, EmbeddingOutput(pooled.outputs.data.tolist()), pooled)


def classification_output(
    pooled: PoolingRequestOutput[PoolingOutput], labels: Sequence[str]
) -> ClassificationRequestOutput:
    probs: list[float] = pooled.outputs.data.tolist()
    classes = ClassificationOutput(probs, labels[probs.index(max(probs))] if labels else None)
    return with_form(ClassificationRequestOutput, classes, pooled)


def with_form(
    kind: Callable[..., Result], form: object, pooled: PoolingRequestOutput[PoolingOutput]
) -> Result:
    """The same result with its vector in the form of another class."""
    ids, cached = pooled.prompt_token_ids, pooled.num_cached_tokens
    return kind(pooled.request_id, form, ids, cached, metrics=pooled.metrics)
