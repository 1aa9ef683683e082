"""POST /v1/completions: texts that continue prompts, whole or streamed."""

from __future__ import annotations

from functools import partial
from statistics import fmean

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from server.frontend.asks.answers import Complete
from server.frontend.asks.parts import End, Head, Part, Terms
from server.http.endpoint import Endpoint
from server.options.server_flags import ServerConfig
from server.reading.prompts import Prompt
from server.routes.answering import ChoicesWriter, ask, repeated_fields, respond, ways_of
from server.schemas.completions import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionRequest,
)
from server.schemas.logprobs import CompletionLogprobs, PromptLogprobs, completion_logprobs, prompt_logprobs
from worker.protocol import TokenLogprobs

router = APIRouter(route_class=Endpoint, tags=["Completions"])


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue a prompt, or each of several."""
    answer = await ask(request, body, body.terms, "cmpl-", partial(read_completion, body))
    return await respond(request, answer, write_completion(answer.head, body), stream=bool(body.stream))


def read_completion(
    body: CompletionRequest, prompts: list[Prompt], terms: Terms, config: ServerConfig
) -> Complete:
    """What a completion asks for."""
    return Complete(
        terms=terms,
        prompts=prompts,
        sampling=body.to_sampling(),
        form=body.asked_form(),
        thinking_budget=body.thinking_budget,
        counts_output=not body.scores_only,
        **ways_of(body, config),
    )


def write_completion(
    head: Head, body: CompletionRequest
) -> ChoicesWriter[CompletionChunkChoice, CompletionChoice]:
    """A writer of texts that continue prompts."""
    repeated = repeated_fields(head)
    writers = [_ChoiceWriter(head, body, index) for index in range(head.choices)]

    def whole(choices: list[CompletionChoice], end: End) -> Completion:
        if body.chooses:
            choices = _best_choices(choices, [one.drawn for one in writers], head.n, body.shown)
        return Completion(
            **repeated,
            system_fingerprint=head.fingerprint,
            choices=choices,
            usage=head.whole_usage(end),
            metrics=end.metrics,
        )

    empty = CompletionChunk(**repeated, system_fingerprint=head.fingerprint or UNSET, choices=[])
    return ChoicesWriter(head, writers, empty, whole)


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

    def __init__(self, head: Head, body: CompletionRequest, index: int) -> None:
        self._body = body
        self._scores_only, self._ranks = body.scores_only, body.ranks
        self._index = index
        self._prompt = head.prompts[index // head.n]
        self._names = head.names
        self._begun = False
        self._width = 0
        """Length in characters of the text so far, as offsets of tokens count it."""
        self._prompt_logprobs: list[TokenLogprobs] | None = None
        self.drawn: list[float] = []
        """The logprobs of its tokens, if the best choices are chosen by them."""

    def chunk(self, part: Part) -> CompletionChunkChoice:
        delta = part.delta
        text, ids = delta.text, delta.token_ids
        entries: list[TokenLogprobs | None] = [*delta.logprobs]
        if self._ranks:
            self.drawn += [entry.values[0] for entry in delta.logprobs]
        if self._scores_only:
            text, ids, entries = "", [], []
        answered = ids
        first, self._begun = not self._begun, True
        if first:
            self._prompt_logprobs = delta.prompt_logprobs
        if first and self._body.echo:
            written = self._prompt.text
            echoed = self._names.text_of(self._prompt.tokens) if written is None else written
            text, self._width = echoed + text, self._names.begin(self._prompt.tokens, echoed)
            ids = [*self._prompt.tokens, *ids]
            entries = [None, *(delta.prompt_logprobs or ()), *entries]
        chunk = CompletionChunkChoice(index=self._index, text=text)
        if self._body.logprobs is not None and ids:
            offsets, self._width = self._names.offsets(ids, self._width)
            chunk.logprobs = completion_logprobs(ids, entries, self._names, offsets)
        if self._body.return_token_ids:
            chunk.token_ids = answered  # an echoed prompt's are in prompt_token_ids
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
