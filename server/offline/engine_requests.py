"""Requests of `LLMEngine`, from the check to the last output: prompts to answer, and texts to pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import MappingProxyType

from engine_core.protocol import Failed, Grammar, Pooled, Source, Tokens
from server.errors import ApiError, from_engine
from server.frontend.text_output import ALL_TOKENS, Delta, TextOutput
from server.media.prompt import as_media
from server.model_facts import Facts
from server.offline.program_media import Encoded, PreparedItems
from server.offline.prompt_forms import Prompt
from server.offline.request_outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    Logprob,
    LogprobsByToken,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
)
from server.requests.beam_rounds import FIRST_ROUND, Beam, advance
from server.requests.beam_search import BeamSearchParams, read_rules
from server.requests.pooling import Item
from server.requests.sampling import RequestOutputKind, SamplingParams
from server.text.tokenizer import Tokenizer, unpack
from worker.protocol import Pooling, Sampling, TokenLogprobs, Vectors


def tokens_per_output(sampling: SamplingParams, least: int, kind: RequestOutputKind | None = None) -> int:
    """How many tokens lie between two outputs of an answer. `kind` overrides the kind of the parameters."""
    if (kind or sampling.output_kind) == RequestOutputKind.FINAL_ONLY:
        return ALL_TOKENS
    return max(least, sampling.stream_interval or 1)


class OutputBuilder:
    """Collects the n answers to one prompt while they are generated: deltas go in, outputs come out."""

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


NO_ITEMS: PreparedItems = MappingProxyType({})
_NOTHING = Vectors(b"", (0,))
"""The vectors of a request that failed."""

EngineSequence = tuple[list[int], Sampling | Pooling]
"""The tokens and the parameters of a sequence that a request has the engine compute."""

Output = RequestOutput | PoolingRequestOutput[PoolingOutput] | BeamSearchOutput


class GenerationRequest:
    """One prompt and its n answers: a sequence of the engine for each of `params`."""

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        encoded: Encoded,
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
        self.media = encoded.media
        self.prompt_len = 0
        tokens = encoded.ids if facts.sources is None else list(facts.sources.start)
        resolved = sampling.resolve(facts, tokenizer, len(encoded.ids))
        self.sequences: Sequence[EngineSequence] = [(tokens, params) for params in resolved]
        self.source = None if facts.sources is None else facts.sources.source(encoded.ids)
        self._builder = OutputBuilder(request_id, encoded.text, encoded.shown_ids, sampling, tokenizer, kind)
        self.most_guesses = sampling.speculative_tokens
        self.may_end_early = bool(sampling.stop)
        """Whether a stop string may end a sequence, which the engine cannot see."""
        self.salt = prompt.salt
        self.grammar = grammar
        self.adapter = ""
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
        """Takes an answer about the sequence of params[index]; returns whether that sequence is finished."""
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
        """The next output, if there is one now."""
        if self._error is not None:
            return self._builder.fail(self._error)
        if not self._changed:
            return None
        self._changed = False
        return self._builder.output()


class PoolingRequest:
    """One text and its vectors: one sequence of the engine."""

    def __init__(self, request_id: str, item: Item, media: PreparedItems = NO_ITEMS) -> None:
        """`media` has the media of the item."""
        self.request_id = request_id
        self.tokens = unpack(item.tokens)
        self.media = as_media(item.media, media)
        self.prompt_len = 0
        self.sequences: Sequence[EngineSequence] = [(self.tokens, item.params)]
        self.may_end_early = False
        self.most_guesses: int | None = None
        self.source: Source | None = None
        self.salt = ""
        self.grammar: Grammar | None = None
        self.adapter = ""
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
        pooled = PoolingOutput.of(self.vectors)
        return PoolingRequestOutput(
            self.request_id, pooled, self.tokens, self._cached, error=self._error, metrics=self._metrics
        )


class BeamRequest:
    """One prompt and the search for its likeliest answers: a sequence for each that is followed, again and
    again, of which each gives the next token."""

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        encoded: Encoded,
        search: BeamSearchParams,
        facts: Facts,
        tokenizer: Tokenizer,
    ) -> None:
        """Raises BadRequest."""
        self.request_id = request_id
        self.tokens, self.media, self.salt = encoded.ids, encoded.media, prompt.salt
        asked = search.sampling()
        [resolved] = asked.resolve(facts, tokenizer, len(self.tokens))
        self.adapter = ""
        self.may_end_early = False
        self.most_guesses: int | None = 0
        self.source: Source | None = None
        self.grammar: Grammar | None = None
        self.finished = False
        self._rules = read_rules(search.beams(), asked, resolved, len(self.tokens), facts)
        self._round, self._landed = FIRST_ROUND, dict[int, TokenLogprobs]()
        self._search, self._tokenizer = search, tokenizer
        self._output = BeamSearchOutput(request_id=request_id)

    @property
    def sequences(self) -> Sequence[EngineSequence]:
        """The sequences of the round that begins."""
        params = self._rules.sampling(self._round)
        return [([*self.tokens, *beam.tokens], params) for beam in self._round.followed]

    @property
    def prompt_len(self) -> int:
        """The tokens of its prompt, once its sequences have tokens of answers, too."""
        return len(self.tokens) if self._round is not FIRST_ROUND else 0

    def take(self, index: int, answer: Tokens | Pooled | Failed) -> bool:
        if isinstance(answer, Failed):
            self._output.error = from_engine(answer)
            self.finished = True
        elif isinstance(answer, Tokens) and answer.logprobs:
            [self._landed[index]] = answer.logprobs
        else:
            self.finished = True
        if len(self._landed) == len(self._round.followed):
            entries = [self._landed[index] for index in range(len(self._landed))]
            self._round, self._landed = advance(self._round, entries, self._rules), {}
            if not self._round.followed:
                self._output.sequences = [self._sequence(beam) for beam in self._round.found]
                self.finished = True
        return True

    def output(self) -> Output | None:
        return self._output if self.finished else None

    def _sequence(self, beam: Beam) -> BeamSearchSequence:
        tokens, stops = [*self.tokens, *beam.tokens], beam.finish == "stop"
        written = tokens if not stops or self._search.include_stop_str_in_output else tokens[:-1]
        return BeamSearchSequence(
            tokens=tokens,
            logprobs=[_by_token(entry, self._tokenizer.token_text) for entry in beam.logprobs],
            cum_logprob=beam.total,
            text=self._tokenizer.decode(written, False),
            finish_reason=beam.finish,
            stop_reason=tokens[-1] if stops else None,
        )


EngineRequest = GenerationRequest | PoolingRequest | BeamRequest
