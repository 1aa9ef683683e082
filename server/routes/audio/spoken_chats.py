"""The conversations by which models transcribe that hear sounds in chats, as their authors trained them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from server.errors import BadRequest
from server.model_facts import Facts
from server.schemas.audio.form import LANGUAGES, AudioForm
from server.schemas.chat import ChatRequest

Message = dict[str, Any]

_MARK = "<asr_text>"
"""What Qwen3-ASR writes between the language and the text."""
_LANGUAGE = "language"
"""What begins such an answer."""
_CODES = (
    "ar", "yue", "zh", "cs", "da", "nl", "en", "fi", "fr", "de", "el", "hi", "hu", "id", "it", "ja", "ko",
    "mk", "ms", "fa", "pl", "pt", "ro", "ru", "es", "sv", "th", "tr", "vi",
)  # fmt: skip
NAMES = {"fil": "Filipino", **{code: LANGUAGES[code].title() for code in _CODES}}
"""code -> the name by which Qwen3-ASR knows a language."""
_TWO_LETTERS = {code: name for code, name in LANGUAGES.items() if len(code) == 2}


_DRAWS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "max_completion_tokens",
)  # fmt: skip
"""Fields of a form that a chat has, too."""


class SpokenChat(NamedTuple):
    messages: Callable[[AudioForm, Message], list[Message]]
    """The messages about a sound, which is a part of one. A last one of the assistant is gone on with."""
    mark: str = ""
    """What stands in an answer ahead of the text, if there is something."""

    def conversation(self, form: AudioForm, sound: Message) -> ChatRequest:
        """The chat that a form asks for about a sound, which is a part of a message."""
        messages = self.messages(form, sound)
        fields = {name: getattr(form, name) for name in _DRAWS if getattr(form, name) is not None}
        fields["stream"] = form.stream
        if messages[-1]["role"] == "assistant":
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        if form.model:
            fields["model"] = form.model
        return ChatRequest.model_validate({"messages": messages, **fields})


def _qwen3_asr(form: AudioForm, sound: Message) -> list[Message]:
    """Names and words that come up, the sound, and the language."""
    messages: list[Message] = [{"role": "user", "content": [sound]}]
    if form.prompt.strip():
        messages.insert(0, {"role": "system", "content": form.prompt.strip()})
    if form.language:
        name = NAMES[_code(form.language, NAMES)]
        messages.append({"role": "assistant", "content": f"language {name}{_MARK}"})
    return messages


def _voxtral(form: AudioForm, sound: Message) -> list[Message]:
    """The sound, the language if it is known, and a token that asks for what is said."""
    if form.prompt.strip():
        raise BadRequest("prompt: this model transcribes without one: leave the field out.", "prompt")
    language = f"lang:{_code(form.language, _TWO_LETTERS)}" if form.language else ""
    begun = {"role": "assistant", "content": f"{language}[TRANSCRIBE]"}
    return [{"role": "user", "content": [sound]}, begun]


_CHATS: Mapping[str, SpokenChat] = {
    "qwen3_asr": SpokenChat(_qwen3_asr, _MARK),
    "voxtral": SpokenChat(_voxtral),
}
"""By what processors of media say of their model (`transcribes`)."""


def spoken_chat(facts: Facts) -> SpokenChat:
    """The chat by which a model transcribes that hears sounds in chats."""
    return _CHATS["" if facts.media is None else facts.media.transcribes]


class SpokenText:
    """Takes from an answer, as it comes, what stands ahead of the text, and the blanks around it."""

    def __init__(self, mark: str) -> None:
        """`mark`: what stands between a language and the text; empty if there is none."""
        self._mark, self._held, self._begun = mark, "", False

    def push(self, text: str) -> str:
        """What is told now: all that can change no more."""
        self._held += text
        ahead = self._held.lstrip()
        if not self._begun and self._mark:
            _, mark, said = ahead.partition(self._mark)
            if not mark and (ahead.startswith(_LANGUAGE) or _LANGUAGE.startswith(ahead)):
                return ""
            self._held, self._mark = said if mark else ahead, ""
        if not self._begun:
            self._held = self._held.lstrip()
        told = self._held.rstrip()
        self._begun, self._held = self._begun or bool(told), self._held[len(told) :]
        return told

    def flush(self) -> str:
        """What is left when the answer ends: a language without a text is the text."""
        return self._held.strip()


def _code(language: str, names: Mapping[str, str]) -> str:
    """The code of a language that is named by it, or in English."""
    asked = language.strip()
    for code, name in names.items():
        if asked.lower() in (code, name.lower()):
            return code
    known = ", ".join(sorted(name.title() for name in names.values()))
    raise BadRequest(f"language: {asked[:32]!r} is not a language of this model; it has {known}.", "language")
