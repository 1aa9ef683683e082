"""The endpoints of text-generation-inference, /generate and /generate_stream, and what is posted to `/` there
and in text-embeddings-inference."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from msgspec.structs import replace
from starlette.types import Message

from server.api.logprobs import LOWEST
from server.api.tgi import Details, Generated, GenerateRequest, Token, TokenEvent
from server.errors import TGI, ApiError, error_body
from server.frontend.frontend import Delta
from server.http.endpoint import Endpoint, read_body
from server.http.error_answers import error_response, path_of
from server.http.sse import StreamForm, encode, event
from server.model_facts import GENERATE
from server.reading.body_table import GENERATE as GENERATE_BODY
from server.routes import pooling, tei
from server.routes.conversations.conversation_call import AnswerPlan, plan_form
from server.routes.generation import GenerationCall, admit_answers
from server.routes.request_context import (
    GENERATES,
    cancelled_when_client_leaves,
    frontend_of,
    read_texts,
    require_ready,
    with_warnings,
)

router = APIRouter(route_class=Endpoint, tags=["text-generation-inference"])

ROOT = "/"


@router.post("/generate", dependencies=GENERATES)
@cancelled_when_client_leaves
async def generate(body: GenerateRequest, request: Request) -> Response:
    """Continue a text, as text-generation-inference does."""
    writer, warnings = await _begin(body, request, stream=False)
    tokens: list[Token] = []
    async with aclosing(writer.call.deltas()) as deltas:
        async for _, delta in deltas:
            tokens += writer.read(delta)
    details = replace(writer.details(), tokens=tokens) if body.asked.details else None
    content = encode(Generated(generated_text=writer.text, details=details))
    if path_of(request.scope) == ROOT:
        content = b"[%s]" % content
    return with_warnings(Response(content, media_type="application/json"), warnings)


@router.post("/generate_stream", dependencies=GENERATES)
async def generate_stream(body: GenerateRequest, request: Request) -> Response:
    """Continue a text, and stream each token."""
    writer, warnings = await _begin(body, request, stream=True)
    form = StreamForm(lambda _: writer.reason is not None, _error_event)
    return with_warnings(writer.call.stream(writer.events(), form), warnings)


async def _begin(
    body: GenerateRequest, request: Request, *, stream: bool
) -> tuple[_TextWriter, Sequence[str]]:
    """The answer that is to be written, and what the client is told of what is not enforced."""
    prompts = await read_texts(request, body, GENERATE_BODY)
    completion = body.completion.model_copy(update={"stream": True, "logprobs": 0} if stream else {})
    admission, asked = admit_answers(request, 1, 1), completion.asked_form()
    plan, owner = AnswerPlan(), admission.caller.owner
    if asked is not None:
        plan = await plan_form(frontend_of(request), asked, owner=owner)
    sampling = completion.to_sampling()
    call = GenerationCall(*(request, completion, sampling, prompts, "gen-", admission), bounds=[plan.bounds])
    return _TextWriter(call, body), plan.warnings


def _error_event(error: ApiError) -> bytes:
    return b"data: " + encode(error_body(error, TGI[0])) + b"\n\n"


class _TextWriter:
    """Writes one answer."""

    def __init__(self, call: GenerationCall, body: GenerateRequest) -> None:
        self.call = call
        self.text = body.inputs if body.asked.return_full_text else ""
        """The text so far."""
        self.reason: str | None = None
        """Why the answer has ended, once it has."""

    def read(self, delta: Delta) -> list[Token]:
        """The tokens of a delta. Their texts together are its text."""
        self.text += delta.text
        if delta.finish_reason is not None:
            stopped = "stop_sequence" if isinstance(delta.stop_reason, str) else "eos_token"
            self.reason = stopped if delta.finish_reason == "stop" else "length"
        tokenizer, ids = self.call.frontend.tokenizer, delta.token_ids
        special = [id in tokenizer.special_ids for id in ids]
        texts = ["" if hidden else tokenizer.token_text(id) for id, hidden in zip(ids, special, strict=True)]
        if "".join(texts) != delta.text:  # characters of several tokens, or text that was held back
            texts = [*[""] * (len(ids) - 1), delta.text][: len(ids)]
        logprobs = [max(entry.values[0], LOWEST) for entry in delta.logprobs] or [0.0] * len(ids)
        rows = zip(ids, texts, logprobs, special, strict=True)
        return [Token(id=id, text=text, logprob=logprob, special=mark) for id, text, logprob, mark in rows]

    def details(self) -> Details:
        counts = self.call.counts
        return Details(
            finish_reason=self.reason or "",
            generated_tokens=counts.output,
            seed=self.call.sampling.seed,
            input_length=counts.prompt,
        )

    async def events(self) -> AsyncGenerator[bytes]:
        """An event for each token; the last one has the whole text."""
        index = 0
        async with aclosing(self.call.deltas()) as deltas:
            async for _, delta in deltas:
                tokens = self.read(delta)
                if self.reason and not tokens:
                    tokens = [Token(id=0, text=delta.text, logprob=0.0, special=not delta.text)]
                events = [TokenEvent(index=index + n, token=token) for n, token in enumerate(tokens, 1)]
                index += len(tokens)
                if self.reason:
                    events[-1].generated_text, events[-1].details = self.text, self.details()
                yield b"".join(map(event, events))


class _Posted(msgspec.Struct):
    """What of a body tells for which endpoint it is."""

    inputs: msgspec.Raw = msgspec.Raw(b"")
    texts: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"")
    stream: msgspec.Raw = msgspec.Raw(b"")


_ENDPOINTS = {
    route.path: route
    for each in (router, tei.router, pooling.scores)
    for route in each.routes
    if isinstance(route, Endpoint)
}


@router.post(ROOT, dependencies=[Depends(require_ready)])
async def post_root(request: Request) -> Response:
    """Answer as the endpoint does that the body is for: /generate, /generate_stream, /embed or /predict, by
    what the model does, or /similarity or /rerank."""
    raw = bytes(await read_body(request.receive))
    given = False

    async def receive() -> Message:
        nonlocal given
        if given:
            return await request.receive()
        given = True
        return {"type": "http.request", "body": raw, "more_body": False}

    path = _path_for(raw, frontend_of(request).facts.tasks)
    try:
        return await _ENDPOINTS[path].respond(Request(request.scope, receive))
    except ApiError as error:
        return error_response(error, TGI[0])


def _path_for(raw: bytes, tasks: Collection[str]) -> str:
    """The path of the endpoint that a body is for. One that cannot be read is refused there."""
    try:
        posted = msgspec.json.decode(raw, type=_Posted)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        posted = _Posted()
    first = bytes(posted.inputs)[:1]
    if bytes(posted.texts):
        return "/rerank"
    if first == b"{":
        return "/similarity"
    pools = [path for task, path in (("embed", "/embed"), ("classify", "/predict")) if task in tasks]
    of_generation = bytes(posted.parameters) or bytes(posted.stream) or first == b'"'
    if not pools or (GENERATE in tasks and of_generation):
        return "/generate_stream" if bytes(posted.stream) == b"true" else "/generate"
    return pools[0]
