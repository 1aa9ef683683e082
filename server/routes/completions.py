"""POST /v1/completions: texts that continue prompts, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from statistics import fmean

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from engine_core.client.in_flight import AddOptions
from server.answers.answer_format import NO_REASONING
from server.answers.format_detection import find_format
from server.api.completions import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionRequest,
)
from server.api.logprobs import CompletionLogprobs, PromptLogprobs, completion_logprobs, prompt_logprobs
from server.frontend.frontend import Delta
from server.http.endpoint import Endpoint
from server.http.sse import Chunks, EventStream
from server.reading.prompts import Prompt
from server.reading.readings import COMPLETION
from server.routes.answer_bounds import Form, form_of, with_warnings
from server.routes.generation import GENERATES, Job, admit_answers, answer, config_of, frontend_of
from server.routes.read import read
from worker.protocol import TokenLogprobs

router = APIRouter(route_class=Endpoint, tags=["generate"])

_NO_FORM = Form()
_FORM_FIRST = (
    "thinking_token_budget: the form binds the answer from its first token on, so that none is reasoning"
)


@router.post("/v1/completions", dependencies=GENERATES)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue a prompt, or each of several."""
    frontend_of(request).check_model(body.model)
    prompts = await read(request, body, COMPLETION)
    sampling = body.to_sampling()
    admission = admit_answers(request, len(prompts), sampling.n)
    asked = body.asked_form()
    form = _NO_FORM if asked is None else await form_of(frontend_of(request), asked)
    budgets, told = ([], []) if body.thinking_budget is None else _budgets(request, body, prompts)
    job = Job(
        *(request, body, sampling, prompts, "cmpl-", admission),
        counts_output=not body.scores_only,
        bounds=form.bounds,
        bounds_each=budgets,
    )
    if body.stream:
        silence = config_of(request).sse_keep_alive_interval
        response: Response = EventStream(
            _events(job, body),
            silence,
            job.times.expected_header,
            on_flow=job.set_paused,
            tell_wait=job.tell_wait,
        )
    else:
        response = await answer(request, _whole(job, body))
    warnings = (*form.warnings, *told)
    return with_warnings(response, warnings) if warnings else response


def _budgets(
    request: Request, body: CompletionRequest, prompts: list[Prompt]
) -> tuple[list[AddOptions], list[str]]:
    """What the engine is told of the reasoning behind each prompt, or why there is no budget."""
    tokenizer, config = frontend_of(request).tokenizer, config_of(request)
    format = find_format(tokenizer, config.tool_call_parser, config.reasoning_parser)
    if format.thinking is None:
        return [], [NO_REASONING]
    if body.asked_form() is not None:
        return [], [_FORM_FIRST]
    found: list[AddOptions] = []
    for prompt in prompts:
        text = tokenizer.decode(prompt.tokens, False) if prompt.text is None else prompt.text
        is_open = format.leaves_thinking_open(text)
        found.append({"thinking": format.thinking_within(tokenizer, body.thinking_budget, is_open=is_open)})
    return found, []


async def _whole(job: Job, body: CompletionRequest) -> Completion:
    texts = [_ChoiceChunks(job, body, index) for index in range(job.choices)]
    chunks: list[list[CompletionChunkChoice]] = [[] for _ in texts]
    logprobs: list[list[float]] = [[] for _ in texts]
    async with aclosing(job.deltas()) as deltas:
        async for index, delta in deltas:
            chunks[index].append(texts[index].chunk(delta))
            if body.chooses:
                logprobs[index] += [entry.values[0] for entry in delta.logprobs]
    choices = [text.join(parts) for text, parts in zip(texts, chunks, strict=True)]
    return Completion(
        id=job.id,
        created=job.created,
        model=job.model,
        system_fingerprint=job.fingerprint,
        choices=_best_choices(choices, logprobs, job.sampling.n, body.shown) if body.chooses else choices,
        usage=job.usage(),
        cache_diagnosis=job.cache_diagnosis,
    )


def _best_choices(
    choices: list[CompletionChoice], logprobs: list[list[float]], drawn: int, shown: int
) -> list[CompletionChoice]:
    """The choices with the highest mean logprob of those drawn for each prompt, the best one first."""
    best: list[CompletionChoice] = []
    for first in range(0, len(choices), drawn):
        of_prompt = range(first, first + drawn)
        ranked = sorted(of_prompt, key=lambda index: fmean(logprobs[index] or [0.0]), reverse=True)
        best += [choices[index] for index in ranked[:shown]]
    return [replace(choice, index=index) for index, choice in enumerate(best)]


async def _events(job: Job, body: CompletionRequest) -> AsyncGenerator[bytes]:
    texts = [_ChoiceChunks(job, body, index) for index in range(job.choices)]
    empty = CompletionChunk(
        id=job.id,
        created=job.created,
        model=job.model,
        system_fingerprint=job.fingerprint or UNSET,
        choices=[],
    )
    chunks = Chunks(empty)
    last = b""
    async with aclosing(job.deltas()) as deltas:
        async for index, delta in deltas:
            if delta.is_notice:
                yield b""
                continue
            chunk = texts[index].chunk(delta)
            event = chunks.event(chunk, job.usage_in_chunk(index))
            if job.running:
                yield event
            else:
                last = event
    yield last + job.end(chunks)


class _ChoiceChunks:
    """Makes the chunks of one choice. The whole answer is their join, so both forms say the same."""

    def __init__(self, job: Job, body: CompletionRequest, index: int) -> None:
        self._body = body
        self._scores_only = body.scores_only
        self._index = index
        self._prompt = job.prompt_of(index)
        self._names = job.names
        self._decode = partial(
            job.frontend.tokenizer.decode, skip_special_tokens=job.sampling.skip_special_tokens
        )
        self._begun = False
        self._width = 0
        """Length in characters of the text so far, as offsets of tokens count it."""
        self._prompt_logprobs: list[TokenLogprobs] | None = None

    def chunk(self, delta: Delta) -> CompletionChunkChoice:
        text, ids = delta.text, delta.token_ids
        entries: list[TokenLogprobs | None] = [*delta.logprobs]
        if self._scores_only:
            text, ids, entries = "", [], []
        first, self._begun = not self._begun, True
        if first:
            self._prompt_logprobs = delta.prompt_logprobs
        if first and self._body.echo:
            text = self._prompt_text() + text
            ids = [*self._prompt.tokens, *ids]
            entries = [None, *(delta.prompt_logprobs or ()), *entries]
        chunk = CompletionChunkChoice(index=self._index, text=text)
        if self._body.logprobs is not None and ids:
            chunk.logprobs = self._logprobs(ids, entries)
        if self._body.return_token_ids:
            chunk.token_ids = ids
            chunk.prompt_token_ids = self._prompt.tokens if first else UNSET
        if delta.finish_reason is not None:
            chunk.finish_reason = "length" if self._scores_only else delta.finish_reason
            chunk.stop_reason = None if self._scores_only else delta.stop_reason
        return chunk

    def join(self, chunks: list[CompletionChunkChoice]) -> CompletionChoice:
        logprobs = CompletionLogprobs([], [], [], [])
        for chunk in chunks:
            if chunk.logprobs is not None:
                logprobs.extend(chunk.logprobs)
        last = chunks[-1]
        returns_ids = bool(self._body.return_token_ids)
        return CompletionChoice(
            index=self._index,
            text="".join(chunk.text for chunk in chunks),
            logprobs=None if self._body.logprobs is None else logprobs,
            finish_reason=last.finish_reason,
            stop_reason=None if isinstance(last.stop_reason, UnsetType) else last.stop_reason,
            token_ids=[id for chunk in chunks for id in chunk.token_ids or ()] if returns_ids else None,
            prompt_logprobs=self._separate_prompt_logprobs(),
            prompt_token_ids=self._prompt.tokens if returns_ids else None,
        )

    def _logprobs(self, ids: list[int], entries: list[TokenLogprobs | None]) -> CompletionLogprobs:
        offsets, self._width = self._names.offsets(ids, self._width)
        return completion_logprobs(ids, entries, self._names, offsets)

    def _prompt_text(self) -> str:
        return self._decode(self._prompt.tokens) if self._prompt.text is None else self._prompt.text

    def _separate_prompt_logprobs(self) -> PromptLogprobs | None:
        """The field `prompt_logprobs`. Logprobs of an echoed prompt are in `logprobs` already."""
        if self._body.prompt_logprobs is None or self._prompt_logprobs is None:
            return None
        return prompt_logprobs(self._prompt_logprobs, self._names)
