"""POST /pooling where the operator's own class makes prompts of `data`, and of their vectors the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import Field

from models.plugins import load_plugin
from server.errors import BadRequest
from server.http.endpoint import Endpoint
from server.http.sse import encode
from server.options.server_flags import ServerConfig
from server.requests.pooling import PooledText, PoolingParams, Source, TextReader
from server.requests.vectors import as_array
from server.routes.pooling_call import PoolingCall
from server.schemas.pooling_bodies import PoolingBody
from server.text.tokenizer import unpack

router = APIRouter(route_class=Endpoint, tags=["pool"])

_FLAG = "--io-processor-plugin"
_METHODS = ("parse_data", "pre_process", "post_process")


class PluggedRequest(PoolingBody):
    """The body that the operator's class reads, in whatever form it has chosen."""

    data: Any = Field(description="What the class of --io-processor-plugin reads.")
    task: str | None = Field(default=None, pattern="^plugin$", description="plugin, or left out.")


@dataclass(frozen=True, slots=True)
class PooledData:
    data: np.ndarray


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """The vectors of a prompt that the class gets, under vLLM's names."""

    request_id: str
    outputs: PooledData
    prompt_token_ids: Sequence[int]
    finished: bool = True


def open_io_processor(config: ServerConfig) -> Any:
    """The operator's object, made as vLLM makes it. Raises ValueError if its class cannot be used."""
    name = config.plugins.io_processor_plugin or ""
    found = load_plugin(_FLAG, name)
    if missing := [method for method in _METHODS if not callable(getattr(found, method, None))]:
        raise ValueError(f"{_FLAG} {name}: it has no method {missing[0]}")
    try:
        return found(config, None)
    except Exception as error:
        raise ValueError(f"{_FLAG} {name}: {type(error).__name__}: {error}") from error


@router.post("/pooling")
async def pool_data(body: PluggedRequest, request: Request) -> Response:
    """Pool the prompts that the operator's class makes of the data, and answer what it makes of them."""
    call = PoolingCall(request, body, "pooling-")
    processor, facts = request.app.state.io_processor, call.facts

    def read() -> list[PooledText]:
        parsed = processor.parse_data(body.data)
        params = PoolingParams()
        if (merge := getattr(processor, "merge_pooling_params", None)) is not None:
            params = merge(PoolingParams())
        prompts = processor.pre_process(prompt=parsed, request_id=call.id)
        reader = TextReader(facts, call.frontend.tokenizer, body.truncation(facts), "")
        return reader.read_all(_sources(prompts), params.resolve(facts))

    items = await _run(read)
    vectors = await call.run(items)
    outputs = [
        PooledPrompt(call.id, PooledData(as_array(one).copy()), unpack(item.tokens))
        for item, one in zip(items, vectors, strict=True)
    ]
    data = await _run(lambda: encode(processor.post_process(outputs, request_id=call.id)))
    head = {"request_id": call.id, "created_at": int(time.time())}
    return Response(encode(head)[:-1] + b',"data":' + data + b"}", media_type="application/json")


async def _run(work: Callable[[], Any]) -> Any:
    """Have the class work in a thread. A ValueError of its own is the client's fault."""
    try:
        return await asyncio.to_thread(work)
    except ValueError as error:
        raise BadRequest(f"data: {error}", "data") from error


def _sources(prompts: Any) -> list[Source]:
    """The prompts that the class has made: one or several, each a text, token ids, or an object of these."""
    is_one = isinstance(prompts, str | dict) or (prompts and isinstance(prompts[0], int))
    found: list[Source] = []
    for each in [prompts] if is_one else prompts:
        one = (each.get("prompt_token_ids") or each.get("prompt")) if isinstance(each, dict) else each
        if not isinstance(one, str) and not (
            isinstance(one, list) and all(isinstance(id, int) for id in one)
        ):
            raise TypeError(f"pre_process returns texts or lists of token ids, and not {type(one).__name__}")
        found.append(one)
    return found
