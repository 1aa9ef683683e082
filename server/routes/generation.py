"""A request that generates, while it is answered: deltas of all prompts in one stream, counts, chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
from fastapi import Request
from msgspec import UNSET, UnsetType

from engine_core.client.in_flight import AddOptions
from server.access.admission import Admission
from server.access.request_state import Attributes
from server.errors import BadRequest
from server.frontend.frontend import Delta
from server.frontend.merged_generators import merged
from server.frontend.text_output import ALL_TOKENS
from server.http.sse import DONE, DONE_FORM, KEEP_ALIVE, Chunks, EventStream, StreamForm
from server.media.prompt import as_media
from server.options.server_flags import GuessReportLevel
from server.reading.prompts import Prompt
from server.requests.sampling_params import SamplingParams
from server.requests.speculation_reports import AnswerMetrics, report_guesses
from server.routes.request_context import EngineCall, admit, frontend_of
from server.schemas.logprobs import TokenNames
from server.schemas.sampling_fields import ChunkChoice, GenerationBody, StreamOptions, Usage
from worker.protocol import Sampling

_NO_OPTIONS = StreamOptions()


def admit_answers(request: Request, prompts: int, n: int) -> Admission:
    """Lets in a request for n answers to each of its prompts, before they are tokenized."""
    frontend = frontend_of(request)
    limits = frontend.facts.limits
    n = min(max(n, 1), limits.n)  # a wrong one is refused where parameters are checked
    if prompts * n > limits.answers:
        raise BadRequest(
            f"prompt and n may ask for at most {limits.answers} answers together, got {prompts} x {n}.", "n"
        )
    return admit(request, frontend, prompts * n)


class TokenCounts(NamedTuple):
    prompt: int
    cached: int
    """The tokens of the prompt that were found in the prefix cache."""
    output: int


class GenerationCall(EngineCall):
    """A request that generates, and the tokens counted so far."""

    def __init__(
        self,
        request: Request,
        body: GenerationBody,
        sampling: SamplingParams,
        prompts: list[Prompt],
        prefix: str,
        admission: Admission,
        *,
        counts_output: bool = True,
        bounds: Sequence[AddOptions],
    ) -> None:
        """`bounds` say for each prompt what its answers are held to."""
        super().__init__(request, body.terms, prefix)
        config = self.config
        self.sampling, self.prompts, self._body = sampling, prompts, body
        self.id = admission.take_id(self.id)
        self.fingerprint = self.facts.ready.worker.fingerprint or None
        as_ids = body.return_tokens_as_token_ids
        self.names = TokenNames(
            self.frontend.tokenizer,
            as_ids=config.return_tokens_as_token_ids if as_ids is None else as_ids,
            hides_special=sampling.skip_special_tokens,
        )
        options, forced = body.stream_options or _NO_OPTIONS, config.enable_force_include_usage
        self.sends_usage = forced or bool(options.include_usage)
        self.sends_usage_always = forced or (self.sends_usage and bool(options.continuous_usage_stats))
        self._interval = max(config.stream_interval, body.stream_interval or 1) if body.stream else ALL_TOKENS
        self._keep_alive = config.sse_keep_alive_interval
        self._counts_output, self._admission = counts_output, admission
        self._options, self._bounds = self._add_options(admission), bounds
        self._guess_level: GuessReportLevel = config.reports.per_request_spec_decode_metrics
        self.metrics: AnswerMetrics | UnsetType = UNSET
        """What became of guesses, if the operator wants it told and there is one answer."""
        if self._guess_level != "none" and len(prompts) == sampling.n == 1:
            self._options["reports_guesses"] = True
        if len(prompts) > 1:
            self._options["group"] = self.frontend.new_group()
        # Checks the sampling parameters, so n is valid from here on.
        self._streams = self._generate_all()
        self.choices = self.running = len(prompts) * sampling.n
        """Number of choices whose last delta is still to come."""
        self._output, self._cached = [0] * self.choices, [0] * len(prompts)
        self.reasoning: dict[int, int] | None = None
        """The tokens of reasoning of each choice so far, if answers are read for it."""
        self.state.work = self

    def prompt_of(self, choice: int) -> Prompt:
        return self.prompts[choice // self.sampling.n]

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta]]:
        """Yields the deltas of all prompts as they come, each with its choice's index. To be called once."""
        self.times.submit()
        if len(self._streams) == 1:
            async with aclosing(self._streams[0]) as stream:
                async for delta in stream:
                    yield self._count(0, delta), delta
        else:
            async with aclosing(merged(self._streams)) as streams:
                async for prompt, delta in streams:
                    yield self._count(prompt, delta), delta

    def _count(self, prompt: int, delta: Delta) -> int:
        """Counts the delta's tokens, notes its times, and returns the index of its choice."""
        choice = prompt * self.sampling.n + delta.index
        if self._counts_output:
            self._output[choice] += len(delta.token_ids)
        if delta.index == 0 and delta.cached_tokens:
            self._cached[prompt] += delta.cached_tokens
            self.times.cached_tokens += delta.cached_tokens
        if delta.expected is not None and self.times.expected is None:
            self.times.expected = delta.expected
        if delta.finish_reason is not None:
            self.running -= 1
            if delta.timing is not None:
                self.times.add(delta.timing)
            if delta.guesses is not None:
                self.metrics = report_guesses(delta.guesses, self._guess_level)
        return choice

    def _generate_all(self) -> list[AsyncGenerator[Delta]]:
        prompts, sampling = self.prompts, self.sampling
        lengths = [prompt.length for prompt in prompts]
        self._admission.check_tokens(sampling.n * sum(lengths))
        self._admission.read(sum(lengths))
        if len(prompts) == 1 and sampling.n == 1:
            return [self._generate(0)]
        resolved = sampling.resolve_all(self.facts, self.frontend.tokenizer, lengths)
        return [self._generate(number, params) for number, params in enumerate(resolved)]

    def _generate(self, number: int, params: list[Sampling] | None = None) -> AsyncGenerator[Delta]:
        """The answers to the prompt of this number."""
        options: AddOptions = {**self._options, **self._bounds[number]}
        prompt = self.prompts[number]
        if prompt.rows or prompt.media:
            items = as_media(prompt.media, self.state.media_items) if prompt.media else ()
            media = (*(each.as_media() for each in prompt.rows), *items)
            options["media"] = tuple(sorted(media, key=lambda one: one.at))
        return self.frontend.generate(
            self.prompts[number].ids,
            self.sampling,
            params=params,
            interval=self._interval,
            request_id=self.id,
            replica=self._replica,
            admission=self._admission,
            beams=self._body.beams() if self._body.use_beam_search else None,
            **options,
        )

    def count_reasoning(self, choice: int, tokens: int) -> None:
        """Note how many tokens of a choice are reasoning, for the usage, if answers are read for it."""
        if self.reasoning is not None:
            self.reasoning[choice] = tokens

    def stream(self, events: AsyncGenerator[bytes], form: StreamForm = DONE_FORM) -> EventStream:
        """The answer that sends these events as they come."""
        return EventStream(
            events,
            self._keep_alive,
            self.times.expected_header,
            on_flow=lambda paused: self.frontend.set_paused(self._admission, paused),
            form=form,
            tell_wait=self._tell_wait,
        )

    async def _tell_wait(self) -> str:
        """What a stream waits for in which nothing comes, for a comment in it."""
        standing = await self._admission.standing()
        if standing is not None and standing.ahead >= 0:
            return f"waiting {standing.ahead} ahead"
        if standing is not None and standing.read < standing.known - 1:
            return f"reading {standing.read} of {standing.known}"
        return KEEP_ALIVE

    @property
    def counts(self) -> TokenCounts:
        """The tokens of all prompts and choices so far."""
        prompt = sum(prompt.length for prompt in self.prompts)
        return TokenCounts(prompt, sum(self._cached), sum(self._output))

    def describe(self) -> Attributes:
        counts, asked = self.counts, self.sampling
        return {
            **super().describe(),
            "gen_ai.request.n": asked.n,
            "gen_ai.request.max_tokens": asked.max_tokens,
            "gen_ai.request.temperature": asked.temperature,
            "gen_ai.request.top_p": asked.top_p,
            "gen_ai.usage.num_sequences": self.choices,
            "gen_ai.usage.prompt_tokens": counts.prompt,
            "gen_ai.usage.completion_tokens": counts.output,
        }

    def usage(self) -> Usage:
        counts = self.counts
        reasoning = None if self.reasoning is None else sum(self.reasoning.values())
        media = sum(map(_media_tokens, self.prompts)) if self.state.media_items else 0
        return self._timed(self._usage(counts.prompt, counts.output, counts.cached, reasoning, media))

    def usage_of(self, choice: int) -> Usage:
        prompt = choice // self.sampling.n
        reasoning = None if self.reasoning is None else self.reasoning.get(choice, 0)
        asked, output, cached = self.prompts[prompt], self._output[choice], self._cached[prompt]
        media = _media_tokens(asked) if asked.media else 0
        return self._usage(asked.length, output, cached, reasoning, media)

    def usage_in_chunk(self, choice: int) -> Usage | UnsetType:
        """The usage in a chunk with a delta of this choice, which has been counted.

        The last one brings the times, if they are asked for and no chunk for the usage alone follows.
        """
        if self.sends_usage_always:
            return self.usage_of(choice)
        ends_with_times = self._shows_timing and not self.running and not self.sends_usage
        return self.usage() if ends_with_times else UNSET

    def end(self, chunks: Chunks) -> bytes:
        """The end of a stream: a chunk with what was asked for beside the choices, and `[DONE]`."""
        usage = self.usage() if self.sends_usage else UNSET
        more: dict[str, Any] = {}
        if self.metrics is not UNSET:
            more["metrics"] = self.metrics
        return (chunks.event(None, usage, **more) if self.sends_usage or more else b"") + DONE


def _media_tokens(prompt: Prompt) -> int:
    """The tokens of a prompt in whose place there are embeddings of media."""
    return sum([item.embeddings for item in prompt.media])


C = TypeVar("C", bound=ChunkChoice)
W_co = TypeVar("W_co", covariant=True)


class ChoiceWriter(Protocol, Generic[C, W_co]):
    """Makes the chunks of one choice. The whole choice is their join, so both forms say the same."""

    def chunk(self, delta: Delta) -> C: ...

    def join(self, chunks: list[C]) -> W_co: ...


async def whole_choices(call: GenerationCall, writers: Sequence[ChoiceWriter[C, W_co]]) -> list[W_co]:
    """All choices of an answer, once they are complete."""
    chunks: list[list[C]] = [[] for _ in writers]
    async with aclosing(call.deltas()) as deltas:
        async for index, delta in deltas:
            chunks[index].append(writers[index].chunk(delta))
    return [writer.join(parts) for writer, parts in zip(writers, chunks, strict=True)]


async def chunk_events(
    call: GenerationCall,
    writers: Sequence[ChoiceWriter[C, object]],
    empty: msgspec.Struct,
    opening: bytes = b"",
) -> AsyncGenerator[bytes]:
    """The events of a stream. `empty` is a chunk without choices; `opening` is sent with the first tokens."""
    chunks, last = Chunks(empty), b""
    async with aclosing(call.deltas()) as deltas:
        async for index, delta in deltas:
            if delta.is_notice:
                yield b""
                continue
            chunk = writers[index].chunk(delta)
            usage = call.usage_in_chunk(index)
            says_nothing = chunk.is_empty and isinstance(usage, UnsetType)
            data, opening = opening + (b"" if says_nothing else chunks.event(chunk, usage)), b""
            if not call.running:
                last = data
            elif data:
                yield data
    yield last + call.end(chunks)
