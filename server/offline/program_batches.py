"""Calls of `LLM` for many requests, all checked before any runs, whose outputs keep the order of the prompts;
and decisions, which `AsyncLLM` makes, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from server.access.request_state import RequestState
from server.errors import BadRequest
from server.frontend.asks.deciding import Decide
from server.frontend.asks.parts import Terms
from server.frontend.asks.pooling import Compare
from server.frontend.frontend import Frontend
from server.media.inline_files import InlineFiles
from server.model_facts import GENERATE, require_task
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
from server.offline.prompt_forms import Adapters, LoRARequest, ReadOptions, for_each, read_sides, validated
from server.offline.request_outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    with_form,
)
from server.reading.decisions import read_decisions
from server.reading.pooled_conversations import read_media_pairs
from server.reading.reading_context import ReadingContext
from server.requests.beam_search import BeamSearchParams
from server.requests.pooling import PoolingParams, Truncation
from server.requests.sampling_params import RequestOutputKind
from server.requests.scoring import Compared, Pairs, ScoreOptions, read_pairs
from server.schemas.decisions.openai_decisions import Decision, DecisionRequest, write_decision
from server.terminal.progress_bar import ProgressBar

State = str | Sequence[Mapping[str, Any]]
"""A text, or the items of a conversation as /v1/decisions has them."""
_DECIDED_AT_ONCE = 4
"""The texts of a call that are decided about at a time, each with all of its questions."""


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
            one.state.close()


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
            text=frontend.tokenizer.decode(written, params.skip_special_tokens),
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
    names: Callable[[int], list[str]],
    shows: bool,
) -> list[ScoringRequestOutput]:
    """The scores of texts that are compared, all by one adapter. `names` gives so many ids of requests."""
    files = InlineFiles()
    pairs = Pairs(*[await asyncio.to_thread(read_sides, side, files) for side in sides])
    number = max(len(pairs.queries), len(pairs.documents))
    asked = for_each("lora_request", LoRARequest, adapters, None, number)
    frontends = await adapted(frontend, asked) or [frontend]
    if len(set(frontends)) > 1:
        raise BadRequest("texts are compared by one adapter: give one LoRARequest", "lora_request")
    facts = frontends[0].facts
    options = ScoreOptions(
        use_activation=params.activates(),
        truncation=Truncation.from_request(params.truncate_prompt_tokens, None, facts),
        instruction=instruction,
        names=("data_1", "data_2"),
        dimensions=params.dimensions,
    )

    def read(context: ReadingContext) -> Compared:
        if pairs.has_media:
            return read_media_pairs(pairs, options, context, "")
        return read_pairs(pairs, options, facts, context.tokenizer)

    state = RequestState(frontend=frontends[0], inline_files=files)
    compared, started = await read_prepared(state, read), RequestMetrics()
    with _bar("Pooling", len(compared.queries) + len(compared.documents), shows) as bar, closing(state):
        terms = Terms(state, "", shares_id=True)
        answer = await state.frontend.ask(Compare(terms=terms, texts=compared, tell=bar.add))
    named, scores = names(len(answer.scores)), map(ScoringOutput, answer.scores)
    if facts.score_type != "cross-encoder":
        return [ScoringRequestOutput(*each) for each in zip(named, scores, strict=True)]
    # The two texts of a score are one prompt.
    pooled = outputs_of(named, compared.documents, answer.pooled, started)
    return [with_form(ScoringRequestOutput, *each) for each in zip(scores, pooled, strict=True)]


async def decide(
    frontend: Frontend,
    states: State | Sequence[State],
    questions: Sequence[Mapping[str, Any]],
    adapter: LoRARequest | None = None,
    name: str = "",
) -> list[Decision]:
    """Answers the same questions about each text, in order. Raises ApiError."""
    [own] = await adapted(frontend, [adapter])
    require_task(GENERATE, own.facts.tasks)
    several = not isinstance(states, str) and not all(isinstance(one, Mapping) for one in states)
    given = states if several else [states]
    bodies = [
        validated(DecisionRequest, {"input": one, "questions": [dict(each) for each in questions]})
        for one in given
    ]
    return await all_of([_decide(own, body, name) for body in bodies], _DECIDED_AT_ONCE)


async def _decide(frontend: Frontend, body: DecisionRequest, name: str) -> Decision:
    with closing(RequestState(frontend=frontend, inline_files=InlineFiles())) as state:
        read = await read_prepared(state, partial(read_decisions, body))
        terms = Terms(state, name, shares_id=True)
        answer = await frontend.ask(Decide(terms=terms, read=read))
    counts = answer.end.counts
    return write_decision(answer.head.model, answer.decided, counts.prompt, counts.cached)
