"""Calls of `LLM`: many requests, all checked before any runs, whose outputs keep the order of the prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from server.access.request_state import RequestState
from server.errors import BadRequest
from server.frontend.frontend import Frontend
from server.media.inline_files import InlineFiles
from server.offline.program_requests import (
    Asked,
    PooledOutput,
    adapted,
    all_of,
    open_answers,
    open_texts,
    outputs_of,
    read_prepared,
)
from server.offline.prompt_forms import Adapters, LoRARequest, ReadOptions, for_each, read_sides
from server.offline.request_outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from server.reading.pooled_conversations import read_media_pairs
from server.reading.prompts import ReadingContext
from server.requests.beam_search import BeamSearchParams
from server.requests.pooling import PooledText, PoolingParams, Truncation
from server.requests.sampling_params import RequestOutputKind
from server.requests.scoring import Compared, Pairs, ScoreOptions, compute_scores, read_pairs
from server.terminal.progress_bar import ProgressBar
from worker.protocol import Vectors

Names = Callable[[int], list[str]]
"""Gives the ids of so many requests."""


def _bar(title: str, total: int, shows: bool) -> ProgressBar:
    return ProgressBar(total, "prompt", title=title, shows=shows)


async def generate(
    frontend: Frontend, asked: Sequence[Asked], shows: bool, at_once: int | None = None
) -> list[RequestOutput]:
    """The answers to prompts, of which `at_once` are computed at a time, or as many as the engine takes."""
    answers = await open_answers(frontend, asked, RequestOutputKind.FINAL_ONLY)
    try:
        with _bar("Generating", len(asked), shows) as bar:
            return await all_of([one.last(bar.add) for one in answers], at_once)
    finally:
        for one in answers:
            one.close()


async def search(
    frontend: Frontend, asked: Sequence[Asked], params: BeamSearchParams, at_once: int | None, shows: bool
) -> list[BeamSearchOutput]:
    """The likeliest answers to prompts, which are searched for `at_once` of them at a time."""
    found = await generate(frontend, asked, shows, at_once)

    def sequence(prompt: list[int], answer: CompletionOutput) -> BeamSearchSequence:
        tokens, stops = [*prompt, *answer.token_ids], answer.finish_reason == "stop"
        written = tokens[:-1] if stops and not params.include_stop_str_in_output else tokens
        return BeamSearchSequence(
            tokens=tokens,
            logprobs=answer.logprobs or [],
            cum_logprob=answer.cumulative_logprob or 0.0,
            text=frontend.tokenizer.decode(written, False),
            finish_reason=answer.finish_reason,
            stop_reason=tokens[-1] if stops else None,
        )

    return [
        BeamSearchOutput(
            [sequence(one.prompt_token_ids, each) for each in one.outputs if each.token_ids], one.request_id
        )
        for one in found
    ]


async def pool(
    frontend: Frontend, asked: Sequence[Asked], task: str | None, options: ReadOptions, shows: bool
) -> list[PooledOutput]:
    """What the engine makes of texts; `task` wins over that of their parameters."""
    pool_texts = await open_texts(frontend, asked, task, options)
    with _bar("Pooling", len(asked), shows) as bar:
        return await pool_texts(bar.add)


async def score(
    frontend: Frontend,
    sides: tuple[object, object],
    params: PoolingParams,
    instruction: str | None,
    adapters: Adapters,
    names: Names,
    shows: bool,
) -> list[ScoringRequestOutput]:
    """The scores of texts that are compared, all by one adapter."""
    state, files = RequestState(), InlineFiles()
    state.inline_files = files
    pairs = Pairs(*[await asyncio.to_thread(read_sides, side, files) for side in sides])
    number = max(len(pairs.queries), len(pairs.documents))
    asked = for_each("lora_request", LoRARequest, adapters, None, number)
    frontends = await adapted(frontend, asked) or [frontend]
    if len(set(frontends)) > 1:
        raise BadRequest("texts are compared by one adapter: give one LoRARequest", "lora_request")
    state.frontend, facts = frontends[0], frontends[0].facts
    options = ScoreOptions(
        use_activation=params.activates(),
        truncation=Truncation.from_request(params.truncate_prompt_tokens, None, facts),
        instruction=instruction,
        names=("data_1", "data_2"),
    )

    def read(context: ReadingContext) -> Compared:
        if pairs.has_media:
            return read_media_pairs(pairs, options, context, "")
        return read_pairs(pairs, options, facts, context.tokenizer)

    compared = await read_prepared(state, read)
    return await _compare(state, compared, names, shows)


async def _compare(
    state: RequestState, compared: Compared, names: Names, shows: bool
) -> list[ScoringRequestOutput]:
    frontend: Frontend = state.frontend
    outputs: list[PooledOutput] = []

    async def compute(items: list[PooledText]) -> list[Vectors]:
        started = RequestMetrics()
        with _bar("Pooling", len(items), shows) as bar:
            answers = await frontend.pool(items, media_items=state.media_items, tell=bar.add)
        outputs[:] = outputs_of(names(len(items)), items, answers, started)
        return [answer.vectors for answer in answers]

    scores = await compute_scores(compared, frontend.facts, compute)
    named = zip(names(len(scores)), map(ScoringOutput, scores), strict=True)
    scored = [ScoringRequestOutput(*each) for each in named]
    if frontend.facts.score_type == "cross-encoder":  # which reads the two texts of a score as one
        for result, pooled in zip(scored, outputs, strict=True):
            result.prompt_token_ids, result.metrics = pooled.prompt_token_ids, pooled.metrics
            result.num_cached_tokens = pooled.num_cached_tokens
    return scored
