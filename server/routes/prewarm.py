"""POST /prewarm: has prompts computed ahead, so that later requests find them in the cache, and on disk."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing

from fastapi import APIRouter, Request, Response

from engine_core.client.in_flight import AddOptions
from engine_core.engine_stats import DiskReport
from server.api.chat import ChatRequest
from server.api.completions import CompletionRequest
from server.api.pooling_bodies import EmbeddingRequest
from server.api.prewarm import PrewarmAnswer, PrewarmRequest
from server.http.endpoint import Endpoint
from server.http.sse import json_response
from server.reading.body_table import PREWARM
from server.requests.sampling import SamplingParams
from server.routes.generation import GenerationCall, admit_answers
from server.routes.pooling_call import PoolingCall, require_embed
from server.routes.request_context import (
    COMPUTES,
    EngineCall,
    cancelled_when_client_leaves,
    frontend_of,
    read_texts,
    require_generate,
)

router = APIRouter(route_class=Endpoint, tags=["server"])


@router.post("/prewarm", dependencies=COMPUTES)
@cancelled_when_client_leaves
async def prewarm(body: PrewarmRequest, request: Request) -> Response:
    """Compute a prompt ahead, or several, and answer when it is in the cache, and on disk if prefixes are
    kept there.

    The body is one of /v1/chat/completions, /v1/completions or /v1/embeddings; what it says of answers has
    no effect. With `prompt_cache_key` the prompt is kept before others.
    """
    work = _pool(body, request) if isinstance(body, EmbeddingRequest) else _generate(body, request)
    return json_response(await work)


async def _pool(body: EmbeddingRequest, request: Request) -> PrewarmAnswer:
    await require_embed(request)
    call = PoolingCall(request, body, "prewarm-")
    found = await read_texts(request, body, PREWARM)
    answers = await call.compute(found.items, stores=True)
    return _answer(call, call.tokens, call.times.cached_tokens, [answer.disk for answer in answers])


async def _generate(body: ChatRequest | CompletionRequest, request: Request) -> PrewarmAnswer:
    """Have one token of an answer made, which comes with the last of the prompt and is not shown."""
    await require_generate(request)
    frontend_of(request).check_model(body.model)
    prompts = (await read_texts(request, body, PREWARM)).prompts
    admission = admit_answers(request, len(prompts), 1)
    body = body.model_copy(update={"stream": False, "use_beam_search": False})
    sampling, stored = SamplingParams(max_tokens=1, temperature=0.0), AddOptions(stores=True)
    call = GenerationCall(
        *(request, body, sampling, prompts, "prewarm-", admission), bounds=[stored] * len(prompts)
    )
    async with aclosing(call.deltas()) as deltas:
        reports = [delta.disk async for _, delta in deltas if not delta.is_notice]
    return _answer(call, call.counts.prompt, call.counts.cached, reports)


def _answer(call: EngineCall, tokens: int, found: int, reports: Iterable[DiskReport | None]) -> PrewarmAnswer:
    """The answer, if so many tokens of the prompts were found, in the cache or on disk."""
    answer = PrewarmAnswer(
        id=call.id,
        created=call.created,
        model=call.model,
        prompt_tokens=tokens,
        computed_tokens=tokens - found,
        cached_tokens=found,
    )
    if on_disk := [report for report in reports if report is not None]:
        answer.disk_tokens = min(found, sum(report.read for report in on_disk))
        answer.cached_tokens -= answer.disk_tokens
        answer.stored_tokens = sum(report.stored for report in on_disk)
    return answer
