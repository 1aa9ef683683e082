"""Transcriptions of an engine in one's own process by a model that hears sounds in chats."""

from collections.abc import Callable, Sequence

import numpy as np

from models.media.whisper import RATE
from server.api.audio.form import AudioForm, code_of
from server.errors import BadRequest
from server.offline.program_sounds import samples_of
from server.offline.request_outputs import RequestOutput
from server.offline.transcribing import Sound, TranscribeOptions, TranscriptionOutput
from server.requests.sampling import SamplingParams
from server.routes.audio.spoken_chats import CHATS, SpokenText
from server.speech.vocabulary import TRANSLATE


def transcribe_in_chats(
    chat: Callable[..., list[RequestOutput]],
    kind: str,
    sounds: Sequence[Sound],
    options: TranscribeOptions,
    most_seconds: float,
) -> list[TranscriptionOutput]:
    """What is said in recordings, each of which is read whole, so that it has no segments. `kind`: that of
    the model's chats. Raises BadRequest."""
    if options.get("word_timestamps") or options.get("task") == TRANSLATE:
        raise BadRequest("This model writes what is said as it is said, and tells no times.", "task")
    language = options.get("language")
    form = AudioForm.model_validate({"language": language, "prompt": options.get("prompt", "")})
    heard = [np.concatenate(list(samples_of(sound, most_seconds))) for sound in sounds]
    spoken = CHATS[kind]
    talks = [spoken.messages(form, {"type": "audio", "audio": samples}) for samples in heard]
    goes_on = bool(talks) and talks[0][-1]["role"] == "assistant"
    params = SamplingParams(temperature=options.get("temperature", 0.0), max_tokens=None)
    ways = {"continue_final_message": goes_on, "add_generation_prompt": not goes_on}
    outputs = chat(talks, params, use_tqdm=False, **ways)
    return [
        _read(output.outputs[0].text, language, "" if language else spoken.mark, len(samples) / RATE)
        for output, samples in zip(outputs, heard, strict=True)
    ]


def _read(answer: str, language: str | None, mark: str, seconds: float) -> TranscriptionOutput:
    """What an answer says, with the language that is told ahead of `mark`, if there is one."""
    text = SpokenText(mark)
    said = text.push(answer) + text.flush()
    told = answer.partition(mark)[0] if mark and mark in answer else ""
    named = language or told.strip().removeprefix("language").strip()
    return TranscriptionOutput(said, "" if named == "None" else code_of(named), seconds, [])
