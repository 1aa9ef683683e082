"""POST /v1/completions: texts that continue prompts, whole or streamed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from engine_core.client.in_flight import AddOptions
from server.access.request_state import state_of
from server.frontend.frontend import Delta
from server.http.endpoint import Endpoint
from server.http.sse import json_response
from server.output_parsing.answer_format import NO_REASONING
from server.output_parsing.format_detection import find_format
from server.reading.prompts import Prompt
from server.routes.conversations.conversation_call import AnswerPlan, plan_form, tell_of_least
from server.routes.generation import GenerationCall, admit_answers, chunk_events, whole_choices
from server.routes.request_context import (
    config_of,
    frontend_of,
    read_texts,
    with_warnings,
)
from server.schemas.completions import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionRequest,
)
from server.schemas.logprobs import CompletionLogprobs, PromptLogprobs, completion_logprobs, prompt_logprobs
from worker.protocol import TokenLogprobs

router = APIRouter(route_class=Endpoint, tags=["generate"])

_FORM_FIRST = (
    "thinking_token_budget: the form binds the answer from its first token on, so that none is reasoning"
)


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue a prompt, or each of several."""
    frontend_of(request).check_model(body.model)
    prompts: list[Prompt] = await read_texts(request, body)
    sampling = body.to_sampling()
    admission = admit_answers(request, len(prompts), sampling.n)
    bounds, warnings = await _plan(request, body, prompts)
    call = GenerationCall(
        *(request, body, sampling, prompts, "cmpl-", admission),
        counts_output=not body.scores_only,
        bounds=bounds,
    )
    writers = [_ChoiceWriter(call, body, index) for index in range(call.choices)]
    if not body.stream:
        return with_warnings(json_response(await _whole(call, body, writers)), warnings)
    empty = CompletionChunk(
        id=call.id,
        created=call.created,
        model=call.model,
        system_fingerprint=call.fingerprint or UNSET,
        choices=[],
    )
    return with_warnings(call.stream(chunk_events(call, writers, empty)), warnings)


async def _plan(
    request: Request, body: CompletionRequest, prompts: list[Prompt]
) -> tuple[list[AddOptions], Sequence[str]]:
    """What the engine is told of the answers to each prompt, and the client of what has no effect."""
    frontend, config, asked = frontend_of(request), config_of(request), body.asked_form()
    owner = state_of(request.scope).caller.owner
    plan = AnswerPlan() if asked is None else await plan_form(frontend, asked, owner=owner)
    plan = tell_of_least(plan, body.min_tokens)
    bounds = [plan.bounds for _ in prompts]
    if body.thinking_budget is None:
        return bounds, plan.warnings
    format = find_format(frontend.tokenizer, config.tool_call_parser, config.reasoning_parser)
    if format.thinking is None:
        return bounds, [*plan.warnings, NO_REASONING]
    if asked is not None:
        return bounds, [*plan.warnings, _FORM_FIRST]
    for number, prompt in enumerate(prompts):
        text = frontend.tokenizer.decode(prompt.tokens, False) if prompt.text is None else prompt.text
        is_open = format.leaves_thinking_open(text)
        thinking = format.thinking_within(frontend.tokenizer, body.thinking_budget, is_open=is_open)
        bounds[number] = {"thinking": thinking}
    return bounds, plan.warnings


async def _whole(
    call: GenerationCall, body: CompletionRequest, writers: Sequence[_ChoiceWriter]
) -> Completion:
    choices = await whole_choices(call, writers)
    if body.chooses:
        choices = _best_choices(choices, [writer.drawn for writer in writers], call.sampling.n, body.shown)
    return Completion(
        id=call.id,
        created=call.created,
        model=call.model,
        system_fingerprint=call.fingerprint,
        choices=choices,
        usage=call.usage(),
        metrics=call.metrics,
    )


def _best_choices(
    choices: list[CompletionChoice], logprobs: list[list[float]], drawn: int, shown: int
) -> list[CompletionChoice]:
    """The choices with the highest mean logprob of those made for each prompt, the best one first.

    Choices without logprobs are those of a beam search, which come in order.
    """
    best: list[CompletionChoice] = []
    for first in range(0, len(choices), drawn):
        of_prompt = range(first, first + drawn)
        ranked = sorted(of_prompt, key=lambda index: fmean(logprobs[index] or [0.0]), reverse=True)
        best += [choices[index] for index in ranked[:shown]]
    return [replace(choice, index=index) for index, choice in enumerate(best)]


class _ChoiceWriter:
    """Makes the chunks of one choice. The whole choice is their join, so both forms say the same."""

    def __init__(self, call: GenerationCall, body: CompletionRequest, index: int) -> None:
        self._body = body
        self._scores_only, self._ranks = body.scores_only, body.ranks
        self._index = index
        self._prompt = call.prompt_of(index)
        self._names = call.names
        self._decode = partial(
            call.frontend.tokenizer.decode, skip_special_tokens=call.sampling.skip_special_tokens
        )
        self._begun = False
        self._width = 0
        """Length in characters of the text so far, as offsets of tokens count it."""
        self._prompt_logprobs: list[TokenLogprobs] | None = None
        self.drawn: list[float] = []
        """The logprobs of its tokens, if the best choices are chosen by them."""

    def chunk(self, delta: Delta) -> CompletionChunkChoice:
        text, ids = delta.text, delta.token_ids
        entries: list[TokenLogprobs | None] = [*delta.logprobs]
        if self._ranks:
            self.drawn += [entry.values[0] for entry in delta.logprobs]
        if self._scores_only:
            text, ids, entries = "", [], []
        first, self._begun = not self._begun, True
        if first:
            self._prompt_logprobs = delta.prompt_logprobs
        if first and self._body.echo:
            written = self._prompt.text
            text = (self._decode(self._prompt.tokens) if written is None else written) + text
            ids = [*self._prompt.tokens, *ids]
            entries = [None, *(delta.prompt_logprobs or ()), *entries]
        chunk = CompletionChunkChoice(index=self._index, text=text)
        if self._body.logprobs is not None and ids:
            offsets, self._width = self._names.offsets(ids, self._width)
            chunk.logprobs = completion_logprobs(ids, entries, self._names, offsets)
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

    def _separate_prompt_logprobs(self) -> PromptLogprobs | None:
        """The field `prompt_logprobs`. Logprobs of an echoed prompt are in `logprobs` already."""
        if self._body.prompt_logprobs is None or self._prompt_logprobs is None:
            return None
        return prompt_logprobs(self._prompt_logprobs, self._names)
