"""Requests of `LLMEngine`, from the check to the last output: prompts to answer, and texts to pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine_core.protocol import Failed, Grammar, Pooled, Tokens
from server.errors import ApiError, from_engine
from server.facts.model_facts import Facts
from server.frontend.choice_output import TextOutput
from server.offline.output_builder import OutputBuilder, tokens_per_output
from server.offline.outputs import PoolingOutput, PoolingRequestOutput, RequestMetrics, RequestOutput
from server.requests.pooling import Item
from server.requests.sampling import RequestOutputKind, SamplingParams
from server.requests.vectors import as_array
from server.text.token_ids import unpack
from server.text.tokenizer import Tokenizer
from worker.protocol import Pooling, Sampling, Vectors

_NOTHING = Vectors(b"", (0,))
"""The vectors of a request that failed."""

Output = RequestOutput | PoolingRequestOutput[PoolingOutput]


class EngineRequest(Protocol):
    """One request: a sequence of the engine for each of `params`."""

    request_id: str
    tokens: list[int]
    params: Sequence[Sampling | Pooling]
    may_end_early: bool
    """Whether a stop string may end a sequence, which the engine cannot see."""
    grammar: Grammar | None
    """The language of the answers, if they have one."""

    @property
    def finished(self) -> bool: ...

    def take(self, index: int, answer: Tokens | Pooled | Failed) -> bool:
        """Takes an answer about the sequence of params[index]; returns true if that sequence is finished."""
        ...

    def output(self) -> Output | None:
        """The next output, if there is one now."""
        ...


class GenerationRequest:
    """One prompt and its n answers."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        tokens: list[int],
        sampling: SamplingParams,
        facts: Facts,
        tokenizer: Tokenizer,
        *,
        kind: RequestOutputKind | None = None,
        least_interval: int = 1,
        grammar: Grammar | None = None,
    ) -> None:
        """Raises BadRequest. `kind` overrides the kind of the parameters."""
        self.request_id = request_id
        self.tokens = tokens
        self.params: Sequence[Sampling | Pooling] = sampling.resolve(facts, tokenizer, len(tokens))
        self._builder = OutputBuilder(request_id, prompt, tokens, sampling, tokenizer, kind)
        self.may_end_early = bool(sampling.stop)
        self.grammar = grammar
        self._error: ApiError | None = None
        interval = tokens_per_output(sampling, least_interval, kind)
        self._texts = [
            TextOutput(index, tokens, sampling, tokenizer, facts.eos_token_ids, interval)
            for index in range(sampling.n)
        ]
        self._changed = False

    @property
    def finished(self) -> bool:
        return self._builder.finished or self._error is not None

    def take(self, index: int, answer: Tokens | Pooled | Failed) -> bool:
        if isinstance(answer, Failed):
            self._error = from_engine(answer)
            return True
        if isinstance(answer, Pooled):
            raise TypeError("a text that is generated was answered with vectors")
        delta = self._texts[index].push(answer)
        if delta is None:
            return False
        self._changed = True
        self._builder.push(delta)
        return delta.finish_reason is not None

    def output(self) -> Output | None:
        if self._error is not None:
            return self._builder.fail(self._error)
        if not self._changed:
            return None
        self._changed = False
        return self._builder.output()


class PoolingRequest:
    """One text and its vectors."""

    def __init__(self, request_id: str, item: Item) -> None:
        self.request_id = request_id
        self.tokens = unpack(item.tokens)
        self.params: Sequence[Sampling | Pooling] = [item.params]
        self.may_end_early = False
        self.grammar: Grammar | None = None
        self.finished = False
        self.vectors = _NOTHING
        self._cached = 0
        self._metrics = RequestMetrics()
        self._error: ApiError | None = None

    def take(self, index: int, answer: Tokens | Pooled | Failed) -> bool:
        match answer:
            case Pooled():
                self.vectors, self._cached = answer.vectors, answer.cached
                self._metrics.add_pooled(answer)
            case Failed():
                self._error = from_engine(answer)
            case Tokens():
                raise TypeError("a text that is pooled was answered with tokens")
        self.finished = True
        return True

    def output(self) -> Output | None:
        pooled = PoolingOutput(as_array(self.vectors).copy())  # a copy can be written to, and made a tensor
        return PoolingRequestOutput(
            self.request_id, pooled, self.tokens, self._cached, error=self._error, metrics=self._metrics
        )
