"""llama.cpp's own paths: /completion, /embedding, and what /props and /slots tell of the server."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from msgspec.structs import asdict

from server.errors import ApiError, error_body
from server.frontend.asks.parts import End, Head, Part
from server.frontend.text_output import Delta
from server.http.endpoint import Endpoint, require_ready
from server.http.sse import StreamForm, encode, list_response
from server.requests.vectors import as_json
from server.routes.answering import ask, respond
from server.routes.completions import read_completion
from server.routes.peers.plain_answers import PlainWriter
from server.routes.pooling import pool_texts
from server.routes.request_context import frontend_of, server_of
from server.schemas.logprobs import TokenNames, chat_logprobs
from server.schemas.vendor_bodies.llama_cpp import LlamaCompletion, LlamaEmbedRequest, LlamaInfill

router = APIRouter(route_class=Endpoint, tags=["llama.cpp"])

_STOPS = {"length": "limit", "stop": "eos", "repetition": "limit"}


@router.post("/completion")
@router.post("/completions")
async def complete(body: LlamaCompletion, request: Request) -> Response:
    """Continue a prompt, or each of several, with llama.cpp's own answer."""
    answer = await ask(request, body, body.terms, "cmpl-", partial(read_completion, body))
    return await respond(request, answer, write_completion(answer.head, body), stream=bool(body.stream))


@router.post("/infill")
async def fill(body: LlamaInfill, request: Request) -> Response:
    """Fill in the middle. The text goes between `input_prefix` and `input_suffix`."""
    return await complete(body, request)


def _error_event(error: ApiError) -> bytes:
    return b"data: " + encode(error_body(error, "/completion")) + b"\n\n"


def write_completion(head: Head, body: LlamaCompletion) -> PlainWriter:
    """A writer of llama.cpp's answers."""
    running, broken = head.choices, set[int]()

    def write(part: Part) -> dict[str, Any]:
        nonlocal running
        delta, counts = part.delta, part.counts
        found: dict[str, Any] = {
            "index": part.choice,
            "content": delta.text,
            "stop": delta.finish_reason is not None,
            "tokens": delta.token_ids if body.return_token_ids else [],
            "id_slot": -1,
            "tokens_predicted": counts.output,
            "tokens_evaluated": counts.prompt,
        }
        if body.logprobs is not None:
            found["completion_probabilities"] = _probabilities(delta, head.names)
        if "\n" in delta.text:
            broken.add(part.choice)
        if delta.finish_reason is None:
            return found
        running -= 1
        by_word = delta.finish_reason == "stop" and isinstance(delta.stop_reason, str)
        return found | {
            "model": head.model,
            "prompt": head.prompts[part.choice // head.n].text or "",
            "generation_settings": {},
            "has_new_line": part.choice in broken,
            "truncated": False,
            "stop_type": "word" if by_word else _STOPS.get(delta.finish_reason, "none"),
            "stopping_word": delta.stop_reason if by_word else "",
            "tokens_cached": counts.cached,
            **({} if part.end is None else {"timings": _timings(part.end)}),
        }

    form = StreamForm(lambda _: running == 0, _error_event)
    return PlainWriter(write, form, is_list=head.choices > 1, is_empty=body.scores_only)


def _probabilities(delta: Delta, names: TokenNames) -> list[dict[str, Any]]:
    """The likeliest tokens of each place, as chat completions has them, and the ids of all."""
    return [
        {
            **asdict(told),
            "id": entry.ids[0],
            "top_logprobs": [
                {"id": id, **asdict(top)} for id, top in zip(entry.ids[1:], told.top_logprobs, strict=True)
            ],
        }
        for entry, told in zip(
            delta.logprobs, chat_logprobs(delta.token_ids, delta.logprobs, names), strict=True
        )
    ]


def _timings(end: End) -> dict[str, float]:
    counts, times = end.counts, end.times
    return {
        "cache_n": counts.cached,
        **_pace("prompt", counts.prompt - counts.cached, times.prefill_time),
        **_pace("predicted", counts.output, times.decode_time),
    }


def _pace(what: str, tokens: int, seconds: float) -> dict[str, float]:
    return {
        f"{what}_n": tokens,
        f"{what}_ms": 1000 * seconds,
        f"{what}_per_token_ms": 1000 * seconds / tokens if tokens else 0.0,
        f"{what}_per_second": tokens / seconds if seconds else 0.0,
    }


@router.post("/embedding")
async def embed(body: LlamaEmbedRequest, request: Request) -> Response:
    """Embed each text. They are in `content` or `input`."""
    answer = await ask(request, body, body.terms, "", pool_texts)
    vectors = enumerate(map(msgspec.Raw, map(as_json, answer.vectors)))
    return list_response(encode({"index": index, "embedding": [vector]}) for index, vector in vectors)


@router.get("/props", dependencies=[Depends(require_ready)])
async def show_properties(request: Request) -> Response:
    """Describe the served model, as llama.cpp does."""
    frontend = frontend_of(request)
    facts, kinds = frontend.facts, frontend.media.facts.most if frontend.media else {}
    return JSONResponse(
        {
            "default_generation_settings": {"n_ctx": facts.max_model_len, "params": facts.defaults},
            "total_slots": facts.ready.worker.max_num_seqs,
            "model_alias": facts.model_names[0],
            "model_path": facts.root,
            "chat_template": facts.chat_template or next(iter(frontend.tokenizer.chat.sources), ""),
            "modalities": {"vision": "image" in kinds, "audio": "audio" in kinds},
            "build_info": f"facet {version('facet-serve')}",
            "is_sleeping": frontend.orders.asleep,
        }
    )


@router.get("/slots", dependencies=[Depends(require_ready)])
async def show_slots(request: Request) -> Response:
    """List the slots, as llama.cpp does. Answers have none of their own here: the first ones are told as
    busy."""
    facts, live = frontend_of(request).facts, server_of(request).live
    slots = range(facts.ready.worker.max_num_seqs)
    return JSONResponse(
        [{"id": slot, "n_ctx": facts.max_model_len, "is_processing": slot < live} for slot in slots]
    )
