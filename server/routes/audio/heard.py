"""Transcriptions by a model that hears sounds in chats: a form becomes a conversation."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from server.api.audio import answers
from server.api.audio.form import LANGUAGES, AudioForm
from server.api.chat import ChatRequest
from server.errors import BadRequest
from server.http.endpoint import INLINE, ITEMS
from server.http.sse import ClientGone, json_response, while_connected
from server.media.inline import InlineFiles
from server.media.parts import MediaFile
from server.reading.body_table import CHAT
from server.routes.conversations.conversation_call import begin_conversation

_MARK = "<asr_text>"
"""What Qwen3-ASR writes between the language and the text."""
_CODES = (
    "ar", "yue", "zh", "cs", "da", "nl", "en", "fi", "fr", "de", "el", "hi", "hu", "id", "it", "ja", "ko",
    "mk", "ms", "fa", "pl", "pt", "ro", "ru", "es", "sv", "th", "tr", "vi",
)  # fmt: skip
NAMES = {"fil": "Filipino", **{code: LANGUAGES[code].title() for code in _CODES}}
"""code -> the name by which Qwen3-ASR knows a language."""
_DRAWS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "max_completion_tokens",
)  # fmt: skip
"""Fields of a form that a chat has, too."""
_OF_PIECES = (
    "chunking_strategy", "condition_on_prev_tokens", "include", "timestamp_granularities",
    "compression_ratio_threshold", "logprob_threshold", "no_speech_threshold",
)  # fmt: skip
"""Fields that ask how pieces are read, or for what only their readings tell."""


async def hear(request: Request, form: AudioForm, file: bytes, *, translates: bool) -> Response:
    """Answer with what is said in a file."""
    _check(form, translates=translates)
    files = request.scope[INLINE] = InlineFiles()
    chat = _conversation(form, files.add(MediaFile(file)))
    try:
        text, seconds = await while_connected(request.receive, _heard(request, chat))
    except ClientGone:
        raise ClientDisconnect from None
    if form.response_format == "text":
        return Response(f"{text}\n", media_type="text/plain; charset=utf-8")
    return json_response(answers.Transcription(text, answers.DurationUsage.of(seconds)))


async def _heard(request: Request, chat: ChatRequest) -> tuple[str, float]:
    """The text of the answer, and the seconds of the sound."""
    call = await begin_conversation(request, chat, chat, CHAT, "trsc-")
    async with aclosing(call.deltas()) as deltas:
        text = "".join([delta.text async for _, delta in deltas])
    frames = sum(item.prepared.grid[2] for item in request.scope[ITEMS].values())
    _, mark, said = text.partition(_MARK)
    return (said if mark else text).strip(), frames / 100


def _check(form: AudioForm, *, translates: bool) -> None:
    """Refuses what has no meaning for a model that reads a recording whole, and tells no times."""
    if translates:
        raise BadRequest(
            "This model translates nothing: POST /v1/audio/transcriptions for what is said, as it is said."
        )
    if form.response_format not in ("json", "text"):
        raise BadRequest(
            f"response_format: {form.response_format} has times, which this model does not tell; use json or "
            "text.",
            "response_format",
        )
    if form.stream or form.stream_include_usage:
        raise BadRequest(
            "stream: this model's text is told when it is complete. A chat with `input_audio` streams.",
            "stream",
        )
    if given := [name for name in _OF_PIECES if name in form.model_fields_set]:
        raise BadRequest(
            f"{given[0]}: this model reads a recording whole, and not piece by piece: leave the field out.",
            given[0],
        )


def _conversation(form: AudioForm, reference: str) -> ChatRequest:
    """The conversation in which the model was trained: names and words, the sound, and the language."""
    messages: list[dict[str, Any]] = []
    if form.prompt.strip():
        messages.append({"role": "system", "content": form.prompt.strip()})
    part = {"type": "audio_url", "audio_url": {"url": reference}}
    messages.append({"role": "user", "content": [part]})
    fields = {name: getattr(form, name) for name in _DRAWS if getattr(form, name) is not None}
    if form.language:
        messages.append({"role": "assistant", "content": f"language {_named(form.language)}{_MARK}"})
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if form.model:
        fields["model"] = form.model
    return ChatRequest.model_validate({"messages": messages, **fields})


def _named(language: str) -> str:
    asked = language.strip()
    for code, name in NAMES.items():
        if asked.lower() in (code, name.lower()):
            return name
    raise BadRequest(
        f"language: {asked[:32]!r} is no language of this model; it has {', '.join(sorted(NAMES))}.",
        "language",
    )
