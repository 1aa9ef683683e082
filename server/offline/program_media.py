"""Pictures that a program hands over with its prompts, which are prepared in the program's own process."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from engine_core.prompt_media import Media
from models.media.item import MediaError
from models.media.registry import find_media
from server.errors import BadRequest
from server.media.kept_items import Item
from server.media.parts import MEDIA_PARTS, MediaPart
from server.media.preparing import PreparingLimits
from server.media.prompt import Laid, Placed, Written, as_media, encode_written, marked
from server.media.reader import media_facts
from server.model_facts import Facts
from server.text.tokenizer import Tokenizer

_FORMS = "a picture is one of Pillow, the path of a file, or a file's bytes"
_OWN_PARTS = ("image", "image_pil")
"""Types of parts whose picture stands under the same name, beside those of the API."""


class Encoded(msgspec.Struct, frozen=True):
    """A prompt as an engine gets it."""

    text: str | None
    """The text that outputs show."""
    ids: list[int]
    media: tuple[Media, ...] = ()


class ProgramMedia:
    """Prepares pictures for one model. Raises BadRequest for what it does not take."""

    def __init__(
        self, folder: Path, facts: Facts, tokenizer: Tokenizer, settings: Mapping[str, object]
    ) -> None:
        files = find_media(folder) if facts.ready.worker.most_embeddings else None
        if files is None:
            raise BadRequest("This model takes no pictures, only text.", "multi_modal_data")
        self._facts, self._tokenizer = facts, tokenizer
        self._processor, self.facts = media_facts(files, settings, tokenizer, {"image": facts.max_model_len})

    def encode(self, text: str, pictures: Sequence[object], *, add_special_tokens: bool) -> Encoded:
        """Encodes a text that has the family's placeholder for each picture, in order."""
        items = [self._prepare(picture) for picture in pictures]
        by_hash = {item.hash: item for item in items}
        parts = [MediaPart("image", item.hash.hex()) for item in items]
        laid = {part: self._laid(item) for part, item in zip(parts, items, strict=True)}
        placeholder = self.facts.placeholder
        if not placeholder:
            if text or len(items) > 1:
                raise BadRequest(
                    "This model has a vector for a text or for a picture: give one of both.", "prompts"
                )
            layout = laid[parts[0]].layout
            placed = [Placed(items[0].hash, 0, len(layout.tokens), layout.embeddings)]
            return Encoded("", list(layout.tokens), as_media(placed, by_hash))
        if text.count(placeholder) != len(items):
            raise BadRequest(
                f"The prompt has {len(items)} pictures, and {text.count(placeholder)} places for them, "
                f"{placeholder!r} each: write one for each picture.",
                "prompts",
            )
        written = Written(text, parts, is_plain=False)
        size = self._facts.vocab_size
        ids, placed = encode_written(
            written, laid, self.facts, self._tokenizer, size, add_special_tokens=add_special_tokens
        )
        return Encoded(written.plain_text, ids, as_media(placed, by_hash))

    def as_text(self, conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation with marks for what reads like a placeholder, though it is text."""
        return marked(conversation, self.facts, {}, self._tokenizer)

    def _laid(self, item: Item) -> Laid:
        layout = self._processor.layout(item.prepared)
        tokenizer = self._tokenizer
        spelled = layout.spelled(lambda text: tokenizer.encode(text, False)) if layout.texts else layout
        return Laid(item.hash, spelled)

    def _prepare(self, given: object) -> Item:
        from PIL import Image  # imported with the first picture

        from server.media.decoding import decode, in_rgb

        if isinstance(given, Image.Image):
            picture = in_rgb(given)
        else:
            picture = decode(_file(given), PreparingLimits().pixels)
        try:
            prepared = self._processor.prepare(picture)
        except MediaError as error:
            raise BadRequest(str(error), "multi_modal_data") from None
        digest = hashlib.blake2b(msgspec.msgpack.encode((prepared.shape, prepared.grid)), digest_size=32)
        digest.update(prepared.pixels)
        return Item(digest.digest(), prepared)


def _file(given: object) -> bytes:
    match given:
        case bytes() | bytearray():
            return bytes(given)
        case str() | Path():
            return Path(str(given).removeprefix("file://")).read_bytes()
        case _:
            raise TypeError(f"{_FORMS}; got {type(given).__name__}")


def read_pictures(given: object) -> list[object]:
    """The pictures of `multi_modal_data`; raises TypeError."""
    if not isinstance(given, Mapping) or set(cast("Mapping[str, object]", given)) - {"image"}:
        raise TypeError(f"multi_modal_data is {{'image': ...}} with a picture or a list of them: {_FORMS}")
    pictures = cast("Mapping[str, object]", given).get("image")
    if pictures is None:
        return []
    return list(cast("list[object]", pictures)) if isinstance(pictures, list | tuple) else [pictures]


def take_pictures(message: Mapping[str, Any]) -> tuple[dict[str, Any], list[object]]:
    """A message with a part without a file in place of each picture, and the pictures."""
    content, pictures = message.get("content"), list[object]()
    if not isinstance(content, list):
        return dict(message), pictures
    parts: list[object] = []
    for part in cast("list[Any]", content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            parts.append(part)
        elif kind in _OWN_PARTS or MEDIA_PARTS.get(str(kind)) == "image":
            pictures.append(_picture(part[kind] if kind in _OWN_PARTS else part.get("image_url")))
            parts.append({"type": "image_url"})
        else:
            raise BadRequest(
                f"Content parts of type {kind!r} are not supported, text and pictures are.", "messages"
            )
    return {**message, "content": parts}, pictures


def _picture(given: object) -> object:
    """The picture of a part, whose URL may hold it."""
    from server.media.decoding import from_base64

    given = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(given, str) or not given.startswith(("data:", "http:", "https:")):
        return given
    head, comma, data = given.partition(",")
    if not comma or not head.endswith(";base64"):
        raise BadRequest(
            "A picture's URL is file:///path or data:TYPE;base64,DATA here: what lies elsewhere, a program "
            "fetches itself.",
            "messages",
        )
    return from_base64(data.encode())
