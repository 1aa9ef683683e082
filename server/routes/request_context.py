"""What endpoints have of a request, whether it generates or pools: the frontend, checks before its body, its
texts, what its head says, and what every part of its answer repeats.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import Request

from server.access.client_identity import TIMEOUT, limits_of
from server.access.request_state import KEY, RequestState
from server.errors import BadRequest
from server.frontend.asks.parts import Terms
from server.frontend.frontend import Frontend
from server.frontend.many_models import ManyModels
from server.http.middleware import REQUEST_ID
from server.http.sse import ClientWatch
from server.media.prompt import NO_MEDIA, LaidMedia
from server.options.server_flags import ServerConfig
from server.reading.body_table import Reading
from server.schemas.body import LONG, Body
from server.schemas.sampling_fields import RequestTerms

R = TypeVar("R")


def frontend_of(request: Request) -> Frontend:
    """The frontend of the model that a request is for."""
    return request.scope[KEY].frontend


def server_of(request: Request) -> Frontend | ManyModels:
    """All that is served: one model, or several."""
    return request.scope["app"].state.frontend


def frontends_of(request: Request) -> list[Frontend]:
    """The frontends of all models that are loaded."""
    server = server_of(request)
    return server.loaded if isinstance(server, ManyModels) else [server]


def config_of(request: Request) -> ServerConfig:
    """The configuration of the model that a request is for, or of the whole server."""
    return request.scope[KEY].frontend.config


async def read_texts(request: Request, body: Body) -> Any:
    """Reads the texts of a body as the table of endpoints says, unless the helper has done so already."""
    state: RequestState = request.scope[KEY]
    if state.read is not None:
        return state.read
    frontend, reading = frontend_of(request), state.reading
    if frontend.media is None:
        return await _read(state, body, reading, NO_MEDIA)
    watch = ClientWatch(request.receive)
    return await state.read_with_media(lambda media: _read(state, body, reading, media), watch)


async def _read(state: RequestState, body: Body, reading: Reading[R], media: LaidMedia) -> R:
    context = state.frontend.reading_context
    if media:
        context = replace(context, media=media)
    if reading.work is not None and reading.work(body, context) > LONG:
        # The body is short, but what is to be written of it is not.
        raw = json.dumps(body.model_dump(exclude_unset=True)).encode()
        read = state.frontend.long_bodies.read
        return (await read(reading, raw, context.facts, media, owner=state.caller.owner)).result
    return reading.read(body, context)


REPLICA = b"x-data-parallel-rank"
"""The header that names the replica to use. vLLM has the same header with the same meaning."""
PRIORITIES = (b"x-priority", b"x-vllm-priority")
"""The headers that name the priority, in place of the body. vLLM has the second."""


def terms_of(request: Request, said: RequestTerms, prefix: str) -> Terms:
    """How a request is run, as its head and its body say. `prefix` begins the answer's id."""
    state: RequestState = request.scope[KEY]
    config = state.frontend.config
    return Terms(
        state,
        prefix + request_id(state, said.request_id),
        int(time.time()),
        _replica(state, config),
        _priority(state.head, said.priority),
        said.salt,
        limits_of(state.head.get(TIMEOUT), config.access, state.times.started, said.timeout),
        config.reports.enable_timing or "timing" in said.include,
    )


def request_id(state: RequestState, asked: str | None) -> str:
    """The request's id: the client's, or a random one."""
    for where, given in (("X-Request-Id", state.header(b"x-request-id")), ("request_id", asked)):
        if given is not None:
            if not REQUEST_ID.fullmatch(given):
                raise BadRequest(f"{where} must be 1 to 128 characters of A-Z a-z 0-9 . _ : -", where)
            return given
    return secrets.token_hex(16)


def _replica(state: RequestState, config: ServerConfig) -> int | None:
    """The number of the replica that the client names in a header; None if it names none."""
    named = state.header(REPLICA)
    if named is None:
        return None
    numbers = config.replicas.numbers
    if not named.isdecimal() or int(named) not in numbers:
        header, first, last = "X-data-parallel-rank", numbers[0], numbers[-1]
        raise BadRequest(f"{header}: {named[:20]!r} is no replica; they are numbered from {first} to {last}")
    return int(named)


def _priority(head: Mapping[bytes, bytes], asked: int) -> int:
    """The priority that a header names, or else the one that the body asked for."""
    for name in PRIORITIES:
        if (value := head.get(name)) is not None:
            if re.fullmatch(b"-?[0-9]{1,18}", value):
                return int(value)
            header, named = name.decode(), value[:20].decode("latin-1")
            raise BadRequest(f"{header}: {named!r} is no whole number; lower ones run earlier", header)
    return asked
