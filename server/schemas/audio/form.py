"""The form of a transcription: its fields as OpenAI and vLLM have them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from server.errors import BadRequest, TooLarge
from server.schemas.body import Body, Neutral, Text, optional
from server.speech.silence import Silence
from server.speech.temperature_fallback import LADDER, Thresholds
from server.speech.vocabulary import SpeechTokens

Format = Literal["json", "text", "srt", "verbose_json", "vtt", "diarized_json"]
MOST_FIELDS = 64
FORM_BYTES = 1 << 20
"""Bytes that may stand before and behind the file of a form."""
LISTS = frozenset({"timestamp_granularities", "include", "known_speaker_names", "known_speaker_references"})
"""Fields that a form may have several times, with [] behind the name or without."""
_MEMBER = re.compile(r"(\w+)\[(\w*)\]")

LANGUAGES = {
    "en": "english", "zh": "chinese", "de": "german", "es": "spanish", "ru": "russian", "ko": "korean",
    "fr": "french", "ja": "japanese", "pt": "portuguese", "tr": "turkish", "pl": "polish", "ca": "catalan",
    "nl": "dutch", "ar": "arabic", "sv": "swedish", "it": "italian", "id": "indonesian", "hi": "hindi",
    "fi": "finnish", "vi": "vietnamese", "he": "hebrew", "uk": "ukrainian", "el": "greek", "ms": "malay",
    "cs": "czech", "ro": "romanian", "da": "danish", "hu": "hungarian", "ta": "tamil", "no": "norwegian",
    "th": "thai", "ur": "urdu", "hr": "croatian", "bg": "bulgarian", "lt": "lithuanian", "la": "latin",
    "mi": "maori", "ml": "malayalam", "cy": "welsh", "sk": "slovak", "te": "telugu", "fa": "persian",
    "lv": "latvian", "bn": "bengali", "sr": "serbian", "az": "azerbaijani", "sl": "slovenian",
    "kn": "kannada", "et": "estonian", "mk": "macedonian", "br": "breton", "eu": "basque",
    "is": "icelandic", "hy": "armenian", "ne": "nepali", "mn": "mongolian", "bs": "bosnian",
    "kk": "kazakh", "sq": "albanian", "sw": "swahili", "gl": "galician", "mr": "marathi", "pa": "punjabi",
    "si": "sinhala", "km": "khmer", "sn": "shona", "yo": "yoruba", "so": "somali", "af": "afrikaans",
    "oc": "occitan", "ka": "georgian", "be": "belarusian", "tg": "tajik", "sd": "sindhi",
    "gu": "gujarati", "am": "amharic", "yi": "yiddish", "lo": "lao", "uz": "uzbek", "fo": "faroese",
    "ht": "haitian creole", "ps": "pashto", "tk": "turkmen", "nn": "nynorsk", "mt": "maltese",
    "sa": "sanskrit", "lb": "luxembourgish", "my": "myanmar", "bo": "tibetan", "tl": "tagalog",
    "mg": "malagasy", "as": "assamese", "tt": "tatar", "haw": "hawaiian", "ln": "lingala", "ha": "hausa",
    "ba": "bashkir", "jw": "javanese", "su": "sundanese", "yue": "cantonese",
}  # fmt: skip
"""code -> English name."""
_CODES = {name: code for code, name in LANGUAGES.items()}


def _read_strategy(given: object) -> object:
    """A strategy that a form has as text."""
    if not isinstance(given, str):
        return given
    if not given.startswith("{"):
        return {"type": given}
    try:
        return json.loads(given)
    except ValueError:
        raise BadRequest("chunking_strategy is auto, or an object in JSON.", "chunking_strategy") from None


class ServerVad(Body):
    """The rules by which a recording is cut."""

    type: Literal["auto", "server_vad"]
    threshold: Annotated[float, Field(ge=0, le=1)] = Silence().threshold
    silence_duration_ms: Annotated[int, Field(ge=10, le=10_000)] = Silence().silence_duration_ms
    prefix_padding_ms: Annotated[int, Field(ge=0, le=10_000)] = Silence().prefix_padding_ms


class AudioForm(Body):
    """The fields of a form, but for its file."""

    unsupported: ClassVar[Mapping[str, Neutral]] = {
        "hotwords": ("",),
        "known_speaker_names": (),
        "known_speaker_references": (),
    }

    model: Text | None = optional("The model's name.")
    language: Text | None = optional(
        "The code or the English name of the language that is spoken; it is found if not given."
    )
    prompt: Text = Field(
        default="", description="Text that stands before each piece, as if it had been said."
    )
    response_format: Format = Field(default="json", description="The form of the answer.")
    temperature: Annotated[float, Field(ge=0, le=2)] = Field(
        default=0.0, description="0 climbs to 1 while a reading is not good; others are used once."
    )
    timestamp_granularities: list[Literal["word", "segment"]] = Field(
        default_factory=list, description="Which times verbose_json has: of words, segments, or both."
    )
    include: list[Literal["logprobs"]] = Field(
        default_factory=list, description="logprobs: those of the text's tokens, in json."
    )
    stream: bool = Field(default=False, description="Tell the text as it comes.")
    stream_include_usage: bool = Field(default=False, description="Tell tokens before the stream ends.")
    chunking_strategy: Annotated[ServerVad | None, BeforeValidator(_read_strategy)] = optional(
        "auto, or an object server_vad: cut at silence, and read the parts at the same time."
    )
    condition_on_prev_tokens: bool = Field(
        default=False, description="Read each piece with the text so far before it."
    )
    compression_ratio_threshold: float = Field(
        default=Thresholds().compression_ratio, description="A text that compresses by more is tried again."
    )
    logprob_threshold: float = Field(
        default=Thresholds().logprob, description="A text whose tokens have a lower average is tried again."
    )
    no_speech_threshold: float = Field(
        default=Thresholds().no_speech,
        description="A piece that is doubted, and silent with a higher probability, is left out.",
    )
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = optional(
        "Maximum number of tokens of a piece."
    )

    def check(self) -> None:
        """Refuses fields that do not go together."""
        form = self.response_format
        if form == "diarized_json":
            raise BadRequest(
                "response_format: diarized_json tells speakers apart, which this model does not do; use "
                "another format, such as json.",
                "response_format",
            )
        if self.timestamp_granularities and form != "verbose_json":
            raise BadRequest(
                "timestamp_granularities needs response_format=verbose_json.", "timestamp_granularities"
            )
        if self.include and form != "json":
            raise BadRequest("include=logprobs needs response_format=json.", "include")
        if self.stream and form not in ("json", "text"):
            raise BadRequest("stream needs response_format=json or text.", "stream")
        if self.condition_on_prev_tokens and self.chunking_strategy is not None:
            raise BadRequest(
                "condition_on_prev_tokens hands the text on from piece to piece, and chunking_strategy reads "
                "them at the same time: give one of them.",
                "condition_on_prev_tokens",
            )

    def check_untimed(self, *, translates: bool, unknown: Iterable[str], why: str) -> None:
        """Refuses what has no meaning for a model that tells no times. `unknown`: fields that it has no use
        for, which are refused with the reason `why` if they are given."""
        if translates:
            raise BadRequest(
                "This model translates nothing: POST /v1/audio/transcriptions for what is said, as it is "
                "said."
            )
        if (asked := self.response_format) not in ("json", "text"):
            raise BadRequest(
                f"response_format: {asked} has times, which this model does not tell; use json or text.",
                "response_format",
            )
        if given := [name for name in unknown if name in self.model_fields_set]:
            raise BadRequest(f"{given[0]}: {why}: leave the field out.", given[0])

    @property
    def temperatures(self) -> tuple[float, ...]:
        return (self.temperature,) if self.temperature > 0 else LADDER

    @property
    def silence(self) -> Silence | None:
        vad = self.chunking_strategy
        if vad is None:
            return None
        return Silence(vad.threshold, vad.silence_duration_ms, vad.prefix_padding_ms)


def form_fields(pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The fields of a form as an object: name[] is a list, and name[part] an object."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        member = _MEMBER.fullmatch(name)
        field, part = (member[1], member[2]) if member else (name, "")
        if part:
            inside = found.setdefault(field, {})
            if not isinstance(inside, dict) or part in inside:
                raise _given_twice(name)
            inside[part] = value
        elif field in LISTS:
            found.setdefault(field, []).append(value)
        elif name in found:
            raise _given_twice(name)
        else:
            found[name] = value
    return {name: value for name, value in found.items() if value != ""}


def recording_too_large(most: int) -> TooLarge:
    return TooLarge(
        f"A recording may have at most {most >> 20} MiB (--max-audio-mb): send a shorter one, or one that is "
        "compressed.",
        "file",
    )


def _given_twice(name: str) -> BadRequest:
    return BadRequest(f"The form has the field `{name[:64]}` twice.", name[:64])


def code_of(language: str) -> str:
    """The code of a language, which may be named by its English name."""
    named = language.strip().lower()
    return _CODES.get(named, named)


def language_code(named: str | None, known: SpeechTokens, *, translates: bool) -> str | None:
    """The code of a language that a request names; None if it is to be found."""
    if not known.languages:
        if translates:
            raise BadRequest("This model reads English alone, and translates nothing.")
        if named and named.strip().lower() not in ("en", "english"):
            raise BadRequest(f"language: this model reads English alone, not {named[:32]!r}.", "language")
        return "en"
    if not named:
        return None
    code = code_of(named)
    if code not in known.languages:
        codes = ", ".join(sorted(known.languages))
        raise BadRequest(
            f"language: {named[:32]!r} is not a language of this model; it has {codes}.", "language"
        )
    return code
