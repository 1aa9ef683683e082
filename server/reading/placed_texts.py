"""Texts with media that no template has written: they have the family's placeholder for each item."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from models.media.item import Kind
from server.errors import BadRequest
from server.media.media_parts import MediaPart, find_parts
from server.media.preparing import NAMES
from server.media.prompt import MediaNeeded, Written, find_places
from server.reading.prompts import Prompt, prepare_prompt
from server.reading.reading_context import ReadingContext


class PlacedText(msgspec.Struct, frozen=True):
    """A text and the parts of contents that stand for its items, each kind in the order of its places."""

    text: str
    parts: list[dict[str, str]]
    salt: str = ""
    """The cache salt, within which names of items are known."""
    settings: Mapping[str, Any] | None = None
    """Settings for the processor of media."""

    def prepare(self, context: ReadingContext, keep: int | None) -> Prompt:
        """The prompt, cut to its last tokens if `keep` says so. Raises BadRequest and MediaNeeded.

        Where prompts begin with pictures (PaliGemma), the text has the token that begins it behind them.
        """
        written = self.write(context)
        word = "" if context.facts.media is None else context.facts.media.placeholder
        behind = written.text.rpartition(word)[2] if word else written.text
        return prepare_prompt(written, context, keep, special=not context.tokenizer.chat.begins(behind))

    def write(self, context: ReadingContext) -> Written:
        """The text with an item for each place. Raises BadRequest and MediaNeeded."""
        facts = context.facts.media
        found = find_parts([self.parts], facts)
        assert facts is not None, "no model takes parts without them"
        if not facts.placeholder and (self.text or len(found) > 1):
            raise BadRequest(
                "This model has a vector for a text or for a picture: give one of both.", "prompts"
            )
        by_kind: dict[str, list[MediaPart]] = {}
        for part in found:
            by_kind.setdefault(part.kind, []).append(part)
        places = find_places(self.text, facts) if facts.placeholder else [part.kind for part in found]
        words: dict[Kind, str] = {facts.kind: facts.placeholder, "video": facts.video_placeholder}
        for kind, word in words.items():
            given = len(by_kind.get(kind, ()))
            if given != places.count(kind):
                raise BadRequest(
                    f"The prompt has {given} {NAMES[kind]}s, and {places.count(kind)} places for them, "
                    f"{word!r} each: write one for each of them.",
                    "prompts",
                )
        if any(part not in context.media for part in found):
            raise MediaNeeded(found, self.salt, self.settings or {}, {})
        left = {kind: iter(of_kind) for kind, of_kind in by_kind.items()}
        return Written(self.text, [next(left[kind]) for kind in places], is_plain=False)
