"""SGLang's own paths: /generate, and what /get_model_info tells of the model."""

from __future__ import annotations

import time
from functools import partial
from itertools import repeat
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from server.frontend.asks.parts import Head, Part
from server.http.endpoint import Endpoint, require_ready
from server.http.sse import DONE, DONE_FORM
from server.model_facts import GENERATE
from server.routes.answering import ask, respond
from server.routes.completions import read_completion
from server.routes.peers.plain_answers import PlainWriter
from server.routes.request_context import frontend_of
from server.schemas.vendor_bodies.sglang import GenerateRequest

router = APIRouter(route_class=Endpoint, tags=["SGLang"])


@router.post("/generate")
async def generate(body: GenerateRequest, request: Request) -> Response:
    """Continue texts. Each event of a stream has the whole text so far, as SGLang's do."""
    answer = await ask(request, body, body.terms, "", partial(read_completion, body))
    return await respond(request, answer, write_generated(answer.head, body), stream=bool(body.stream))


def write_generated(head: Head, body: GenerateRequest) -> PlainWriter:
    """A writer of SGLang's answers."""
    several = body.is_batch or head.choices > 1

    def write(part: Part) -> dict[str, Any]:
        counts, delta = part.counts, part.delta
        info: dict[str, Any] = {
            "id": head.id,
            "finish_reason": _finish(part),
            "prompt_tokens": counts.prompt,
            "completion_tokens": counts.output,
            "cached_tokens": counts.cached,
        }
        if part.end is not None:
            info["e2e_latency"] = time.monotonic() - part.end.times.started
        if body.logprobs is not None:
            tables = [[*zip(each.values, each.ids, repeat(None))] for each in delta.logprobs]
            info["output_token_logprobs"] = [table[0] for table in tables]
            info["output_top_logprobs"] = [table[1:] for table in tables] if body.logprobs else []
        found = {"text": delta.text, "output_ids": delta.token_ids, "meta_info": info}
        return found | ({"index": part.choice} if several and body.stream else {})

    return PlainWriter(
        write, DONE_FORM, is_list=several, repeats=True, is_empty=body.scores_only, closing=DONE
    )


def _finish(part: Part) -> dict[str, object] | None:
    reason, ids = part.delta.finish_reason, part.delta.token_ids
    if reason is None:
        return None
    if reason == "length":
        return {"type": reason, "length": part.counts.output}
    last = ids[-1] if ids else None
    return {"type": reason, "matched": last if part.delta.stop_reason is None else part.delta.stop_reason}


@router.get("/get_model_info", dependencies=[Depends(require_ready)])
@router.get("/model_info", dependencies=[Depends(require_ready)])
async def show_model(request: Request) -> Response:
    """Describe the served model, as SGLang does."""
    frontend = frontend_of(request)
    facts, kinds = frontend.facts, frontend.media.facts.most if frontend.media else {}
    return JSONResponse(
        {
            "model_path": facts.root,
            "tokenizer_path": facts.root,
            "weight_version": "default",
            "is_generation": GENERATE in facts.tasks,
            "preferred_sampling_params": None,
            "has_image_understanding": "image" in kinds,
            "has_audio_understanding": "audio" in kinds,
        }
    )
