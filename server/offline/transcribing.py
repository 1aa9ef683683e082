"""`LLM.transcribe`: recordings of a program, read by what reads those of HTTP."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec
import numpy as np

from server.access.request_state import RequestState
from server.errors import BadRequest
from server.frontend.asks.answers import Complete
from server.frontend.asks.parts import Terms
from server.frontend.asks.transcribing import Transcribe
from server.frontend.frontend import Frontend
from server.frontend.text_output import ALL_TOKENS
from server.frontend.transcriber import Transcriber
from server.media.audio.recordings import TemporaryPath
from server.media.inline_files import InlineFiles
from server.model_facts import TRANSCRIPTION, require_task
from server.offline.media_forms import as_part, as_sound
from server.offline.program_requests import all_of, read_prepared
from server.offline.prompt_forms import validated
from server.reading.prompts import read_chat
from server.routes.audio.spoken_chats import SpokenText, spoken_chat
from server.schemas.audio.form import AudioForm, code_of
from server.speech.speech_model import Draw
from server.speech.transcription import Segment
from server.speech.vocabulary import TRANSCRIBE, TRANSLATE

Sound = str | Path | np.ndarray
"""The path of a recording, or samples from -1 to 1 at 16 kHz."""


class TranscribeOptions(TypedDict, total=False):
    """Keyword arguments of `LLM.transcribe`, which has those of the form of /v1/audio/transcriptions, too."""

    language: str | None
    """A code or an English name; it is found in each recording if it is not given."""
    task: Literal["transcribe", "translate"]
    prompt: str
    """Text that stands before each piece, as if it had been said."""
    temperature: float
    """0, the default, climbs while a reading is not good; others are used once."""
    word_timestamps: bool


class TranscriptionOutput(msgspec.Struct, frozen=True):
    """The text of a recording."""

    text: str
    language: str
    duration: float
    segments: list[Segment]
    """None of a model that tells no times."""


async def transcribe(
    frontend: Frontend, sounds: Sound | Sequence[Sound], options: Mapping[str, Any]
) -> list[TranscriptionOutput]:
    """What is said in recordings, of which as many are read at a time as the engine runs sequences."""
    require_task(TRANSCRIPTION, frontend.facts.tasks)
    fields = {name: value for name, value in options.items() if value is not None}
    task, words = fields.pop("task", TRANSCRIBE), fields.pop("word_timestamps", False)
    if words:
        fields |= {"timestamp_granularities": ["word"], "response_format": "verbose_json"}
    form = validated(AudioForm, {"seed": Draw().seed, **fields})
    form.check()
    transcriber = frontend.transcriber
    if transcriber is None and (words or task == TRANSLATE):
        raise BadRequest("This model writes what is said as it is said, and tells no times.", "task")

    async def read(sound: Sound) -> TranscriptionOutput:
        if transcriber is None:
            return await _hear(frontend, sound, form)
        return await _transcribe(frontend, transcriber, sound, form, task)

    given = [sounds] if isinstance(sounds, str | Path | np.ndarray) else sounds
    return await all_of([read(sound) for sound in given], frontend.facts.ready.worker.max_num_seqs)


async def _transcribe(
    frontend: Frontend, transcriber: Transcriber, sound: Sound, form: AudioForm, task: str
) -> TranscriptionOutput:
    asked = transcriber.read(form, task, frontend.facts, frontend.tokenizer)
    with TemporaryPath() as copy, closing(RequestState(frontend=frontend)) as state:
        digest = await asyncio.to_thread(_copy, sound, copy)
        terms = Terms(state, "", shares_id=True)
        async with transcriber.opened(copy, digest, "") as recording:
            said = await frontend.ask(Transcribe(terms=terms, recording=recording, asked=asked))
            await said.hear()
            return TranscriptionOutput(said.text, said.language, said.seconds, list(said.segments))


def _copy(sound: Sound, to: TemporaryPath) -> bytes:
    """Writes a recording to a file, which its reader removes, and returns a digest of it."""
    digest = hashlib.blake2b(digest_size=32)
    with BytesIO(as_sound(sound)) if isinstance(sound, np.ndarray) else Path(sound).open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
            to.file.write(piece)
    to.file.flush()
    return digest.digest()


async def _hear(frontend: Frontend, sound: Sound, form: AudioForm) -> TranscriptionOutput:
    """What a model says in a chat that hears sounds there: it reads a recording whole."""
    spoken, files = spoken_chat(frontend.facts), InlineFiles()
    chat = spoken.conversation(form, await asyncio.to_thread(as_part, "audio", sound, files))
    with closing(RequestState(frontend=frontend, inline_files=files)) as state:
        conversation = await read_prepared(state, partial(read_chat, chat))
        terms = Terms(state, "", shares_id=True)
        prompts, sampling = [conversation.prompt], chat.to_sampling()
        asked = Complete(terms=terms, prompts=prompts, sampling=sampling, interval=ALL_TOKENS)
        parts = await (await frontend.ask(asked)).whole()
    seconds = sum(item.prepared.grid[2] for item in state.media_items.values()) / 100
    answer, mark = "".join([part.delta.text for part in parts]), spoken.mark
    text = SpokenText("" if form.language else mark)
    told = answer.partition(mark)[0] if mark and mark in answer and not form.language else ""
    named = form.language or told.strip().removeprefix("language").strip()
    language = "" if named == "None" else code_of(named)
    return TranscriptionOutput(text.push(answer) + text.flush(), language, seconds, [])
