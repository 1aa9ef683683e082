"""The tokens of Whisper's prompts and answers, as a checkpoint's generation config names them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import msgspec

from models.plain_files import ConfigError, read_object

TRANSCRIBE, TRANSLATE = "transcribe", "translate"
_MOST_FIRST = 50
_LANGUAGE = re.compile(r"<\|(\w+)\|>")


class SpeechTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Ids of tokens, and what bounds a text."""

    start: int
    end: int
    previous: int | None
    """What stands before the text that came before; None if the model takes none."""
    no_speech: int
    no_timestamps: int
    languages: dict[str, int] = {}
    """code -> id; empty for a model of English alone, whose prompts have neither language nor task."""
    tasks: dict[str, int] = {}
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    most_first: int = _MOST_FIRST
    """The latest timestamp with which a piece may begin."""
    context: int = 448
    """The most tokens of a prompt and its answer."""
    bands: int = 80
    """The bands of features."""

    @property
    def first_timestamp(self) -> int:
        return self.no_timestamps + 1

    @property
    def most_previous(self) -> int:
        """The most tokens of earlier text in a prompt."""
        return self.context // 2 - 1

    def is_text(self, token: int) -> bool:
        return token < self.end

    def beginning(self, language: str | None, task: str) -> list[int]:
        """The tokens between the text that came before and the answer."""
        if not self.languages:
            return [self.start]
        return [self.start, self.languages[language or "en"], self.tasks[task]]

    def code_of(self, token: int) -> str:
        return next((code for code, id in self.languages.items() if id == token), "en")


def read_tokens(folder: Path) -> SpeechTokens:
    """The tokens of a checkpoint of Whisper. Raises ConfigError."""
    generation: dict[str, Any] = dict(read_object(folder / "generation_config.json"))
    config: dict[str, Any] = dict(read_object(folder / "config.json"))
    both = {**config, **generation}
    try:
        no_timestamps = int(both["no_timestamps_token_id"])
        languages = cast("dict[str, int]", both.get("lang_to_id") or {})
        end = both["eos_token_id"]
        return SpeechTokens(
            start=int(both["decoder_start_token_id"]),
            end=int(end[0] if isinstance(end, list) else end),
            previous=both.get("prev_sot_token_id"),
            no_speech=no_timestamps - 1,
            no_timestamps=no_timestamps,
            languages={
                found[1]: int(id) for name, id in languages.items() if (found := _LANGUAGE.fullmatch(name))
            },
            tasks=cast("dict[str, int]", both.get("task_to_id") or {}),
            suppressed=tuple(both.get("suppress_tokens") or ()),
            suppressed_first=tuple(both.get("begin_suppress_tokens") or ()),
            most_first=int(both.get("max_initial_timestamp_index") or _MOST_FIRST),
            context=int(config["max_target_positions"]),
            bands=int(config["num_mel_bins"]),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"generation_config.json or config.json of a speech model: {error!r}") from None
