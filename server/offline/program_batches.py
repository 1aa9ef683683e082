"""Calls of `LLM`: many requests, all checked before any runs, whose outputs keep the order of the prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from server.access.request_state import RequestState
from server.errors import BadRequest
from server.frontend.asks.parts import Terms
from server.frontend.asks.pooling import Compare
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
    with_form,
)
from server.reading.pooled_conversations import read_media_pairs
from server.reading.prompts import ReadingContext
from server.requests.beam_search import BeamSearchParams
from server.requests.pooling import PoolingParams, Truncation
from server.requests.sampling_params import RequestOutputKind
from server.requests.scoring import Compared, Pairs, ScoreOptions, read_pairs
from server.terminal.progress_bar import ProgressBar


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
    )

    def read(context: ReadingContext) -> Compared:
        if pairs.has_media:
            return read_media_pairs(pairs, options, context, "")
        return read_pairs(pairs, options, facts, context.tokenizer)

    state = RequestState(frontend=frontends[0], inline_files=files)
    compared, started = await read_prepared(state, read), RequestMetrics()
    with _bar("Pooling", len(compared.queries) + len(compared.documents), shows) as bar, closing(state):
        terms = Terms(state, "", int(time.time()), shares_id=True)
        answer = await state.frontend.ask(Compare(terms=terms, texts=compared, tell=bar.add))
    named, scores = names(len(answer.scores)), map(ScoringOutput, answer.scores)
    if facts.score_type != "cross-encoder":
        return [ScoringRequestOutput(*each) for each in zip(named, scores, strict=True)]
    # The two texts of a score are one prompt.
    pooled = outputs_of(named, compared.documents, answer.pooled, started)
    return [with_form(ScoringRequestOutput, *each) for each in zip(scores, pooled, strict=True)]
