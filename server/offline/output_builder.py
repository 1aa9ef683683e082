"""Outputs of a prompt's answers: deltas go in, and what a program gets comes out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from server.access.request_state import RequestState
from server.errors import ApiError
from server.frontend.asks.answers import Answer
from server.frontend.asks.parts import Head
from server.frontend.text_output import ALL_TOKENS, Delta
from server.offline.request_outputs import (
    CompletionOutput,
    Logprob,
    LogprobsByToken,
    RequestMetrics,
    RequestOutput,
)
from server.requests.sampling_params import RequestOutputKind, SamplingParams
from server.text.tokenizer import Tokenizer
from worker.protocol import TokenLogprobs


def tokens_per_output(sampling: SamplingParams, least: int, kind: RequestOutputKind | None = None) -> int:
    """How many tokens lie between two outputs of an answer. `kind` overrides the kind of the parameters."""
    if (kind or sampling.output_kind) == RequestOutputKind.FINAL_ONLY:
        return ALL_TOKENS
    return max(least, sampling.stream_interval or 1)


class OutputBuilder:
    """Collects the n answers to one prompt while they are generated."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        kind: RequestOutputKind | None = None,
    ) -> None:
        """`kind` overrides the kind of the parameters."""
        self.kind = kind or sampling.output_kind
        self._tokenizer = tokenizer
        self._names_tokens = sampling.detokenize
        self._logprobs = sampling.logprobs is not None
        self._sum = [0.0] * sampling.n
        self._unfinished = set(range(sampling.n))
        """Indices of the answers that are not finished."""
        self._metrics = RequestMetrics()
        self._fresh: list[CompletionOutput] = []
        """The parts that came since the last output, for outputs of the kind DELTA."""
        self._output = RequestOutput(request_id, prompt, prompt_token_ids, metrics=self._metrics)
        if self.kind != RequestOutputKind.DELTA:
            self._output.outputs = [self._empty(index) for index in range(sampling.n)]

    @property
    def finished(self) -> bool:
        return not self._unfinished

    def push(self, delta: Delta) -> None:
        self._measure(delta)
        if delta.index == 0 and self._output.num_cached_tokens is None:
            self._output.num_cached_tokens = delta.cached_tokens
        if delta.prompt_logprobs is not None and self._output.prompt_logprobs is None:
            self._output.prompt_logprobs = [None, *self._named(delta.prompt_logprobs)]
        if self.kind == RequestOutputKind.DELTA:
            answer = self._empty(delta.index)
            self._fresh.append(answer)
        else:
            answer = self._output.outputs[delta.index]
        answer.text += delta.text
        answer.token_ids += delta.token_ids
        if answer.logprobs is not None:
            answer.logprobs += self._named(delta.logprobs)
            self._sum[delta.index] += sum(entry.values[0] for entry in delta.logprobs)
            answer.cumulative_logprob = self._sum[delta.index]
        answer.finish_reason, answer.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.finish_reason is not None:
            self._unfinished.discard(delta.index)

    def output(self) -> RequestOutput | None:
        """The next output, if there is one now. Later deltas do not change it."""
        if self.kind == RequestOutputKind.DELTA:
            metrics = replace(self._metrics)
            shown = replace(self._output, outputs=self._fresh, finished=self.finished, metrics=metrics)
            self._output.prompt_logprobs, self._fresh = None, []
            return shown
        if self.finished:
            return replace(self._output, finished=True)
        if self.kind == RequestOutputKind.FINAL_ONLY:
            return None
        answers = [_copy(answer) for answer in self._output.outputs]
        return replace(self._output, outputs=answers, metrics=replace(self._metrics))

    def abort(self) -> RequestOutput:
        """The only output of a request that was aborted before it was sent."""
        for index in sorted(self._unfinished):
            self.push(Delta(index, finish_reason="abort"))
        output = self.output()
        assert output is not None, "answers have ended, and say nothing"
        return output

    def fail(self, error: ApiError) -> RequestOutput:
        """The last output: unfinished answers end with the reason "error"."""
        if self.kind == RequestOutputKind.DELTA:
            last = [self._empty(index) for index in sorted(self._unfinished)]
            self._output.outputs = [*self._fresh, *last]
        else:
            last = [self._output.outputs[index] for index in self._unfinished]
        for answer in last:
            answer.finish_reason = "error"
        self._unfinished.clear()
        return replace(self._output, finished=True, error=error)

    def _empty(self, index: int) -> CompletionOutput:
        return CompletionOutput(index, logprobs=[] if self._logprobs else None)

    def _measure(self, delta: Delta) -> None:
        metrics = self._metrics
        if delta.token_ids:
            metrics.last_token_ts = time.monotonic()
            metrics.first_token_ts = metrics.first_token_ts or metrics.last_token_ts
            metrics.num_generation_tokens += len(delta.token_ids)
        if delta.expected is not None and metrics.expected is None:
            metrics.expected = delta.expected
        if delta.timing is not None:
            metrics.add(delta.timing)
            metrics.scheduled_ts = metrics.scheduled_ts or metrics.queued_ts + delta.timing.queued

    def _named(self, entries: Iterable[TokenLogprobs]) -> Sequence[LogprobsByToken]:
        name = self._tokenizer.token_text if self._names_tokens else lambda _: None
        return [_by_token(entry, name) for entry in entries]


@dataclass
class Answers:
    """The answers to one prompt, which is sent when the first output is asked for."""

    builder: OutputBuilder
    answer: Answer[Head]
    state: RequestState

    async def take(self) -> AsyncGenerator[None, None]:
        """Takes what comes, part by part. Closing the generator ends the request."""
        async with aclosing(self.answer.parts()) as parts:
            async for part in parts:
                if not part.is_notice:
                    self.builder.push(part.delta)
                    yield

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """Yields outputs as they come. Closing the generator ends the request."""
        async with aclosing(self.take()) as pieces:
            async for _ in pieces:
                if (output := self.builder.output()) is not None:
                    yield output

    async def last(self, tell: Callable[[], None] = lambda: None) -> RequestOutput:
        """The whole answers, of which `tell` hears."""
        async with aclosing(self.take()) as pieces:
            async for _ in pieces:
                pass
        tell()
        output = self.builder.output()
        assert output is not None, "answers have ended, and say nothing"
        return output


def _by_token(entry: TokenLogprobs, name: Callable[[int], str | None]) -> LogprobsByToken:
    """The chosen token comes first; `entry` repeats it among the most likely if it is one of these."""
    ranks = (entry.rank, *range(1, len(entry.ids)))
    table: LogprobsByToken = {}
    for token, value, rank in zip(entry.ids, entry.values, ranks, strict=True):
        table.setdefault(token, Logprob(value, rank, name(token)))
    return table


def _copy(answer: CompletionOutput) -> CompletionOutput:
    logprobs = None if answer.logprobs is None else list(answer.logprobs)
    return replace(answer, token_ids=list(answer.token_ids), logprobs=logprobs)
