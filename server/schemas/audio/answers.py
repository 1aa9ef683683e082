"""Answers of transcriptions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from server.schemas.audio.form import LANGUAGES
from server.speech.transcription import Segment, TimedWord


class DurationUsage(msgspec.Struct):
    seconds: int
    type: str = "duration"

    @staticmethod
    def of(seconds: float) -> DurationUsage:
        return DurationUsage(math.ceil(seconds))


class TokenUsage(msgspec.Struct):
    """What a stream has taken, under OpenAI's names and vLLM's."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    prompt_tokens: int
    completion_tokens: int
    type: str = "tokens"


class SpokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class Transcription(msgspec.Struct):
    text: str
    usage: DurationUsage
    logprobs: list[SpokenLogprob] | UnsetType = UNSET


class VerboseTranscription(msgspec.Struct):
    task: str
    language: str
    duration: float
    text: str
    usage: DurationUsage
    segments: list[dict[str, object]] | UnsetType = UNSET
    words: list[TimedWord] | UnsetType = UNSET


def verbose(
    task: str, language: str, duration: float, text: str, segments: Sequence[Segment], asked: Sequence[str]
) -> VerboseTranscription:
    """The answer with all times that are asked for; segments, if none are."""
    answer = VerboseTranscription(
        task=task,
        language=LANGUAGES.get(language, language),
        duration=round(duration, 3),
        text=text,
        usage=DurationUsage.of(duration),
    )
    if "segment" in asked or not asked:
        answer.segments = [_told(number, each) for number, each in enumerate(segments)]
    if "word" in asked:
        answer.words = [word for each in segments for word in each.words]
    return answer


def _told(number: int, segment: Segment) -> dict[str, object]:
    """A segment as clients see it, without its words and logprobs, which stand elsewhere."""
    fields = msgspec.structs.asdict(segment)
    del fields["logprobs"], fields["words"]
    return {"id": number, **fields, "start": round(segment.start, 2), "end": round(segment.end, 2)}


class Choice(msgspec.Struct):
    delta: dict[str, str]
    index: int = 0
    finish_reason: str | None = None


class DeltaEvent(msgspec.Struct, omit_defaults=False):
    """A part of the text, in OpenAI's form and in vLLM's."""

    delta: str
    id: str
    created: int
    model: str
    choices: list[Choice]
    type: Literal["transcript.text.delta"] = "transcript.text.delta"
    object: str = "transcription.chunk"


class DoneEvent(msgspec.Struct):
    text: str
    usage: TokenUsage
    choices: list[Choice]
    """None for clients of vLLM that want usage, which they find in a chunk without any. Others read the first
    one of each chunk."""
    logprobs: list[SpokenLogprob] | UnsetType = UNSET
    type: str = "transcript.text.done"
