"""POST /v1/audio/transcriptions and /v1/audio/translations: the text of a recording, whole or as it comes."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from pydantic import TypeAdapter, ValidationError
from starlette.types import Receive, Scope, Send

from server.access.request_state import RequestState, state_of
from server.errors import BadRequest, refused_if_full
from server.frontend.asks.transcribing import Transcribe, Transcription
from server.frontend.frontend import Frontend
from server.http.endpoint import Endpoint
from server.http.multipart import FormReader
from server.http.sse import ClientWatch, EventStream, json_response
from server.media.audio.recordings import TemporaryPath
from server.media.failures import FULL_TEMPORARY
from server.routes.answering import terms_of
from server.routes.audio.chat_transcriptions import hear
from server.routes.audio.text_events import TextEvents
from server.routes.request_context import frontend_of
from server.schemas.audio import answers
from server.schemas.audio.form import (
    FORM_BYTES,
    MOST_FIELDS,
    AudioForm,
    form_fields,
    recording_too_large,
)
from server.schemas.body import invalid_body
from server.schemas.sampling_fields import RequestTerms
from server.schemas.unknown_fields import FieldNotes
from server.speech.subtitles import srt, vtt
from server.speech.vocabulary import TRANSCRIBE, TRANSLATE
from server.text.tokenizer import Tokenizer

_FORM = TypeAdapter(AudioForm)
_PLAIN = "text/plain; charset=utf-8"


router = APIRouter(route_class=Endpoint, tags=["Speech"])


def _documented() -> dict[str, Any]:
    """How the form is described, whose fields come with a file."""
    schema = AudioForm.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    schema["properties"] = {"file": {"type": "string", "format": "binary"}, **schema["properties"]}
    schema["required"] = ["file"]
    strategy = schema["properties"]["chunking_strategy"]
    strategy["anyOf"] = [{"type": kind} for kind in ("string", "object", "null")]
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


@router.post("/v1/audio/transcriptions", openapi_extra=_documented())
async def create_transcription(request: Request) -> Response:
    """Transcribe a recording."""
    return await _respond(request, TRANSCRIBE)


@router.post("/v1/audio/translations", openapi_extra=_documented())
async def create_translation(request: Request) -> Response:
    """Translate a recording to English text."""
    return await _respond(request, TRANSLATE)


async def _respond(request: Request, task: str) -> Response:
    frontend = frontend_of(request)
    transcriber = frontend.transcriber
    async with AsyncExitStack() as stack:
        reader = FormReader(state_of(request.scope).header(b"content-type") or "", most_fields=MOST_FIELDS)
        most = frontend.config.media.max_audio_mb << 20 if transcriber is None else transcriber.most_bytes
        with refused_if_full(FULL_TEMPORARY):
            upload = stack.enter_context(await asyncio.to_thread(TemporaryPath))
            digest = await _receive(request, reader, upload, most)
        form = _read_form(reader, frontend, state_of(request.scope))
        if transcriber is None:
            file = await asyncio.to_thread(Path(upload.path).read_bytes)
            return await hear(request, form, file, translates=task == TRANSLATE)
        asked = transcriber.read(form, task, frontend.facts, frontend.tokenizer)

        with ClientWatch(request.receive):
            opened = transcriber.opened(upload, digest, state_of(request.scope).caller.owner)
            recording = await stack.enter_async_context(opened)
            terms, streams = terms_of(request, RequestTerms(), "trsc-"), bool(form.stream)
            ask = Transcribe(terms=terms, recording=recording, asked=asked, streams=streams)
            found = await frontend.ask(ask)
            if not streams:
                await found.hear()
                return write_transcription(form, found, frontend.tokenizer)
            events = _events(form, found, frontend.tokenizer)
            return _HeldStream(events, frontend.config.sse_keep_alive_interval, stack.pop_all())


async def _receive(request: Request, form: FormReader, upload: TemporaryPath, most: int) -> bytes:
    """Writes the file of a form as it comes, and returns its digest."""
    digest, size = hashlib.blake2b(digest_size=32), 0
    too_large = recording_too_large(most)

    def write(data: bytes) -> None:
        nonlocal size
        size += len(data)
        if size > most:
            raise too_large
        digest.update(data)
        upload.file.write(data)
        upload.file.flush()

    await form.receive(request.receive, write, most + FORM_BYTES, too_large)
    if not size:
        raise BadRequest("The file of the form is empty.", "file")
    return digest.digest()


def _read_form(reader: FormReader, frontend: Frontend, state: RequestState) -> AudioForm:
    state.notes = FieldNotes(frontend.config.strict_fields)
    try:
        form = _FORM.validate_python(form_fields(reader.values), context=state.notes)
    except ValidationError as error:
        raise invalid_body(error.errors(include_url=False)) from None
    frontend.check_model(form.model)
    named = form.model
    if named and not (frontend.facts.is_name(named) or frontend.config.is_own_path(named)):
        raise BadRequest(
            "model: the form names another model than the header X-Model. Name one of them, or leave the "
            "header out.",
            "model",
        )
    form.check()
    form.stream_include_usage |= frontend.config.enable_force_include_usage
    if form.max_completion_tokens is not None:  # as in vLLM, more than the model can write is no error
        form.max_completion_tokens = min(form.max_completion_tokens, frontend.facts.max_model_len)
    return form


class _HeldStream(EventStream):
    """A stream that gives back what it holds, even if it has never begun."""

    def __init__(self, events: AsyncGenerator[bytes], keep_alive: float, stack: AsyncExitStack) -> None:
        super().__init__(events, keep_alive)
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            await super().__call__(scope, receive, send)


def write_transcription(form: AudioForm, found: Transcription, tokenizer: Tokenizer) -> Response:
    """Writes a transcription that has ended, in the form that was asked for."""
    match form.response_format:
        case "text":
            return Response(f"{found.text}\n", media_type=_PLAIN)
        case "srt":
            return Response(srt(found.segments), media_type=_PLAIN)
        case "vtt":
            return Response(vtt(found.segments), media_type="text/vtt; charset=utf-8")
        case "verbose_json":
            said = found.task, found.language, found.seconds, found.text, found.segments
            return json_response(answers.verbose(*said, form.timestamp_granularities))
        case _:
            usage = answers.DurationUsage.of(found.seconds)
            return json_response(answers.Transcription(found.text, usage, _logprobs(form, found, tokenizer)))


async def _events(form: AudioForm, found: Transcription, tokenizer: Tokenizer) -> AsyncGenerator[bytes]:
    """The events of a transcription while it comes."""
    head = found.head
    events = TextEvents(head.id, head.created, head.model)
    async with aclosing(found.texts()) as texts:
        async for text in texts:
            yield events.delta(text)
    counts, logprobs = found.end.counts, _logprobs(form, found, tokenizer)
    tells = form.stream_include_usage
    yield events.end(counts.prompt, counts.output, tells_usage=tells, logprobs=logprobs)


def _logprobs(
    form: AudioForm, found: Transcription, tokenizer: Tokenizer
) -> list[answers.SpokenLogprob] | UnsetType:
    if not form.include:
        return UNSET
    return [
        answers.SpokenLogprob(tokenizer.token_text(token), value, list(tokenizer.token_bytes(token)))
        for segment in found.segments
        for token, value in zip(segment.tokens, segment.logprobs, strict=True)
        if found.known.is_text(token)
    ]
