"""Shared by the generating endpoints: their checks, the deltas of all prompts in one stream, token counts."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec
from fastapi import Depends, Request, Response
from msgspec import UNSET, UnsetType

from engine_core.client.in_flight import AddOptions
from engine_core.protocol import CacheMiss
from server.access.admission import Admission
from server.access.client_identity import begin_request, caller_of, require_right
from server.access.time_limits import limits_of
from server.api.common import CacheDiagnoses, GenerationBody, StreamOptions, Usage, make_usage
from server.api.logprobs import TokenNames
from server.errors import BadRequest
from server.frontend.frontend import Delta, Frontend
from server.frontend.merged_generators import merged
from server.frontend.text_output import ALL_TOKENS
from server.http.error_answers import CLIENT_GONE
from server.http.middleware import REQUEST_ID
from server.http.sse import DONE, KEEP_ALIVE, Chunks, ClientGone, json_response, while_connected
from server.http.traces import Attributes
from server.options.server_config import ServerConfig
from server.reading.prompts import Prompt, Said
from server.requests.cache_diagnosis import Asked, CacheDiagnosis, explain_miss, one_or_all
from server.requests.sampling import SamplingParams
from server.requests.timing import RequestTimes
from server.task_names import GENERATE, require_task
from worker.protocol import Sampling

REPLICA = b"x-data-parallel-rank"
"""The header that names the replica to use. vLLM has the same header with the same meaning."""
PRIORITIES = (b"x-priority", b"x-vllm-priority")
"""The headers that name the priority, in place of the body. vLLM has the second."""


_NO_OPTIONS = StreamOptions()


class NotJson(BadRequest):
    type = "Bad Request"


def frontend_of(request: Request) -> Frontend:
    return request.scope["app"].state.frontend


def config_of(request: Request) -> ServerConfig:
    return request.scope["app"].state.config


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


def header_of(request: Request, name: bytes) -> str | None:
    """The first header of a name in small letters: in one pass, which is quicker than Starlette's look-up."""
    for key, value in request.scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return None


def replica_of(request: Request) -> int | None:
    """The number of the replica that the client names in a header; None if it names none."""
    named = header_of(request, REPLICA)
    if named is None:
        return None
    size = config_of(request).data_parallel_size
    if not named.isdecimal() or int(named) >= size:
        header = "X-data-parallel-rank"
        raise BadRequest(f"{header}: {named[:20]!r} is no replica; they are numbered from 0 to {size - 1}")
    return int(named)


def times_of(request: Request) -> RequestTimes:
    return request.scope["times"]


def priority_of(request: Request, asked: int) -> int:
    """The priority that a header names, or else the one that the body asked for."""
    for name, value in request.scope["headers"]:
        if name in PRIORITIES:
            if re.fullmatch(b"-?[0-9]{1,18}", value):
                return int(value)
            header, named = name.decode(), value[:20].decode("latin-1")
            raise BadRequest(f"{header}: {named!r} is no whole number; lower ones run earlier", header)
    return asked


async def require_ready(request: Request) -> None:
    """Refuses every request with 503 while the model loads, whatever is wrong with the body."""
    frontend_of(request).require_ready()


async def require_room(request: Request) -> None:
    """Refuses every request before its body is read while the model loads, or the server is full."""
    frontend = frontend_of(request)
    frontend.require_ready()
    if "admission" not in request.scope:  # or it has got a place already
        frontend.admissions.check_room(caller_of(request))
    begin_request(request)


def admit(request: Request, frontend: Frontend, places: int) -> Admission:
    """Lets in a request for so many sequences, or raises an error. Its endpoint ends the admission."""
    taken = request.scope.get("admission")
    admission = frontend.admissions.admit(caller_of(request), places, taken)
    request.scope["admission"] = admission
    admission.since = request.scope["times"].started
    return admission


async def require_json(request: Request) -> None:
    kind = (header_of(request, b"content-type") or "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise NotJson("1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed")


async def require_generate(request: Request) -> None:
    require_right(request, GENERATE)
    require_task(GENERATE, frontend_of(request).facts.tasks)


ENTRY = [Depends(require_ready), Depends(require_json)]
"""Checks of every endpoint that reads a body."""
COMPUTES = [Depends(require_room), Depends(require_json)]
"""Checks of every endpoint that asks the engine."""
GENERATES = [*COMPUTES, Depends(require_generate)]
"""Checks of every endpoint that generates."""


class TokenCounts(NamedTuple):
    prompt: int
    cached: int
    """The tokens of the prompt that were found in the prefix cache."""
    output: int


class Job:
    """A request while it is answered: what every chunk repeats, and the tokens counted so far.

    `bounds` are what every answer is held to; `bounds_each` what those to each prompt are, where they differ.
    """

    def __init__(
        self,
        request: Request,
        body: GenerationBody,
        sampling: SamplingParams,
        prompts: list[Prompt],
        prefix: str,
        admission: Admission,
        *,
        messages: Sequence[Said] = (),
        counts_output: bool = True,
        bounds: AddOptions | None = None,
        bounds_each: Sequence[AddOptions] = (),
    ) -> None:
        config = config_of(request)
        self.frontend = frontend_of(request)
        self.body, self.sampling, self.prompts = body, sampling, prompts
        self.id = admission.take_id(prefix + request_id_of(request, body.request_id))
        self.created = int(time.time())
        self.model = self.frontend.facts.model_names[0]
        self.fingerprint = self.frontend.facts.ready.worker.fingerprint or None
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
        self.times = times_of(request)
        request.scope["work"] = self  # for traces
        self._shows_timing = config.reports.enable_timing or "timing" in body.include
        self._shows_cached, self._counts_output = config.enable_prompt_tokens_details, counts_output
        self._replica, self._priority = replica_of(request), priority_of(request, body.priority)
        self._messages, self._admission = messages, admission
        self._limits = limits_of(request, config.access, self.times.started, body.timeout)
        self._options, self._options_each = self._add_options(bounds or {}), bounds_each
        self._diagnoses: list[CacheDiagnosis | None] = [None] * len(prompts)
        # Checks the sampling parameters, so n is valid from here on.
        self._streams = self._generate_all()
        self.choices = len(prompts) * sampling.n
        self.running = self.choices
        """Number of choices whose last delta is still to come."""
        self._output = [0] * self.choices
        self._cached = [0] * len(prompts)
        self.reasoning: dict[int, int] | None = None
        """The tokens of reasoning of each choice so far, if answers are read for it."""

    def _add_options(self, bounds: AddOptions) -> AddOptions:
        """What the engine is told of each prompt, with `bounds` of its answers."""
        options = self._admission.caller.add_options(self._priority, self.body.cache_salt or "")
        if self._limits is not None:
            self._limits.add_to(options)
        if "cache_diagnosis" in self.body.include:
            options["diagnoses"] = True
        if len(self.prompts) > 1:
            options["group"] = self.frontend.new_group()
        options.update(bounds)
        return options

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
        if delta.miss is not None:
            self._diagnose(prompt, delta.miss)
        if delta.expected is not None and self.times.expected is None:
            self.times.expected = delta.expected
        if delta.finish_reason is not None:
            self.running -= 1
            if delta.timing is not None:
                self.times.add(delta.timing)
        return choice

    def _diagnose(self, index: int, miss: CacheMiss) -> None:
        """Note why no longer prefix of a prompt was cached."""
        prompt, size = self.prompts[index], self.frontend.facts.ready.worker.block_size
        asked = Asked(prompt.tokens, prompt.cut_left, prompt.text, self._messages)
        cached = self._cached[index]
        self._diagnoses[index] = explain_miss(asked, miss, cached, self.frontend.tokenizer, size)

    @property
    def cache_diagnosis(self) -> CacheDiagnoses:
        """The diagnosis of each prompt, if asked for; known when the first tokens have come."""
        return one_or_all([found for found in self._diagnoses if found is not None])

    def _generate_all(self) -> list[AsyncGenerator[Delta]]:
        prompts, sampling = self.prompts, self.sampling
        lengths = [prompt.length for prompt in prompts]
        self._admission.check_tokens(sampling.n * sum(lengths))
        self._admission.read(sum(lengths))
        if len(prompts) == 1 and sampling.n == 1:
            return [self._generate(0)]
        resolved = sampling.resolve_all(self.frontend.facts, self.frontend.tokenizer, lengths)
        return [self._generate(number, params) for number, params in enumerate(resolved)]

    def _generate(self, number: int, params: list[Sampling] | None = None) -> AsyncGenerator[Delta]:
        """The answers to the prompt of this number."""
        options = self._options
        if self._options_each:
            options: AddOptions = {**options, **self._options_each[number]}
        return self.frontend.generate(
            self.prompts[number].ids,
            self.sampling,
            params=params,
            interval=self._interval,
            request_id=self.id,
            replica=self._replica,
            admission=self._admission,
            **options,
        )

    def count_reasoning(self, choice: int, tokens: int) -> None:
        """Note how many tokens of a choice are reasoning, for the usage, if answers are read for it."""
        if self.reasoning is not None:
            self.reasoning[choice] = tokens

    def set_paused(self, paused: bool) -> None:
        """Pauses the request while the client does not read its answer."""
        self.frontend.set_paused(self._admission, paused)

    async def tell_wait(self) -> str:
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
        """What a trace tells of this request."""
        counts, asked = self.counts, self.sampling
        return {
            "gen_ai.request.id": self.id,
            "gen_ai.response.model": self.model,
            "gen_ai.request.n": asked.n,
            "gen_ai.request.max_tokens": asked.max_tokens,
            "gen_ai.request.temperature": asked.temperature,
            "gen_ai.request.top_p": asked.top_p,
            "gen_ai.usage.num_sequences": self.choices,
            "gen_ai.usage.prompt_tokens": counts.prompt,
            "gen_ai.usage.completion_tokens": counts.output,
        }

    def usage(self) -> Usage:
        cached = sum(self._cached)
        reasoning = None if self.reasoning is None else sum(self.reasoning.values())
        length = sum(prompt.length for prompt in self.prompts)
        usage = self._usage(length, sum(self._output), cached, reasoning)
        if self._shows_timing:
            usage.timing = self.times.report()
        return usage

    def end(self, chunks: Chunks) -> bytes:
        """The end of a stream: a chunk with what was asked for beside the choices, and `[DONE]`."""
        usage, diagnosis = self.usage() if self.sends_usage else UNSET, self.cache_diagnosis
        more = {} if isinstance(diagnosis, UnsetType) else {"cache_diagnosis": diagnosis}
        return (chunks.event(None, usage, **more) if self.sends_usage or more else b"") + DONE

    def usage_in_chunk(self, choice: int) -> Usage | UnsetType:
        """The usage in a chunk with a delta of this choice, which has been counted.

        The last one brings the times, if they are asked for and no chunk for the usage alone follows.
        """
        if self.sends_usage_always:
            return self.usage_of(choice)
        ends_with_times = self._shows_timing and not self.running and not self.sends_usage
        return self.usage() if ends_with_times else UNSET

    def usage_of(self, choice: int) -> Usage:
        prompt = choice // self.sampling.n
        reasoning = None if self.reasoning is None else self.reasoning.get(choice, 0)
        return self._usage(self.prompts[prompt].length, self._output[choice], self._cached[prompt], reasoning)

    def _usage(self, prompt: int, output: int, cached: int, reasoning: int | None) -> Usage:
        return make_usage(prompt, output, cached if self._shows_cached else None, reasoning)


def request_id_of(request: Request, asked: str | None) -> str:
    """The request's id: the client's, or a random one."""
    for where, given in (
        ("X-Request-Id", header_of(request, b"x-request-id")),
        ("request_id", asked),
    ):
        if given is not None:
            if not REQUEST_ID.fullmatch(given):
                raise BadRequest(f"{where} must be 1 to 128 characters of A-Z a-z 0-9 . _ : -", where)
            return given
    return secrets.token_hex(16)


async def answer(request: Request, work: Coroutine[Any, Any, msgspec.Struct]) -> Response:
    """Answers with the result of `work`, which is cancelled if the client goes away."""
    return await respond(request, _as_response(work))


async def respond(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    try:
        return await while_connected(request.receive, work)
    except ClientGone:
        return Response(status_code=CLIENT_GONE)


async def _as_response(work: Coroutine[Any, Any, msgspec.Struct]) -> Response:
    return json_response(await work)
