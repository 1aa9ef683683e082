"""`LLM.transcribe`: recordings of a program, read by what reads those of HTTP."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import aclosing, closing
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec
import numpy as np

from engine_core.client.in_flight import AddOptions
from server.errors import BadRequest
from server.frontend.frontend import Frontend
from server.frontend.text_output import admit_own
from server.frontend.transcriber import Transcriber
from server.media.audio.recordings import TemporaryPath
from server.model_facts import TRANSCRIPTION, require_task
from server.offline.media_forms import as_sound
from server.offline.program_requests import Asked, all_of, open_answers
from server.offline.prompt_forms import Conversation, validated
from server.requests.sampling_params import RequestOutputKind, SamplingParams
from server.routes.audio.spoken_chats import CHATS, SpokenText
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
    facts, tokenizer = frontend.facts, frontend.tokenizer
    asked = transcriber.read(form, task, facts, tokenizer)
    places = transcriber.places_for(asked, facts.ready.worker.max_num_seqs)
    with TemporaryPath() as copy:
        digest = await asyncio.to_thread(_copy, sound, copy)
        async with transcriber.opened(copy, digest, "") as recording:
            admission = admit_own(frontend.admissions, places, "")
            try:
                job = transcriber.job(recording, asked, facts, tokenizer, admission, AddOptions)
                async with aclosing(job.run()) as texts:
                    async for _ in texts:
                        pass
            finally:
                admission.release()
            return TranscriptionOutput(job.text, job.language, recording.seconds, job.segments)


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
    media = frontend.facts.media
    spoken = CHATS["" if media is None else media.transcribes]
    messages = spoken.messages(form, {"type": "audio", "audio": sound})
    goes_on = messages[-1]["role"] == "assistant"
    params = SamplingParams(temperature=form.temperature, max_tokens=form.max_completion_tokens)
    template = {"continue_final_message": goes_on, "add_generation_prompt": not goes_on}
    asked = Asked("", Conversation(messages, template), params)
    [answers] = await open_answers(frontend, [asked], RequestOutputKind.FINAL_ONLY)
    with closing(answers):
        answer, mark = (await answers.last()).outputs[0].text, spoken.mark
    seconds = sum(item.prepared.grid[2] for item in answers.state.media_items.values()) / 100
    text = SpokenText("" if form.language else mark)
    told = answer.partition(mark)[0] if mark and mark in answer and not form.language else ""
    named = form.language or told.strip().removeprefix("language").strip()
    language = "" if named == "None" else code_of(named)
    return TranscriptionOutput(text.push(answer) + text.flush(), language, seconds, [])
