"""The media parts of messages: the forms in which clients write them, and which of them a model takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, cast

import msgspec

from models.media.item import Kind
from server.errors import BadRequest
from server.model_facts import MediaFacts

MEDIA_PARTS: dict[str, Kind] = {
    "image_url": "image",
    "input_image": "image",
    "image_embeds": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
}
"""The types of parts that hold media, and the kind of each."""
_DETAILS = ("auto", "low", "high", "original")
_PLURALS = {"image": "images", "audio": "audio", "video": "videos"}
_FIELDS: dict[str, str] = {"image": "image_url", "video": "video_url", "audio": "audio_url"}
"""The fields in which parts of the kinds that are served have their URLs, which are their types too."""
_SOUND = "input_audio"
_EMBEDS, _GRID = "image_embeds", "image_grid_thw"
ROWS = "prompt_embeds"
"""The type of parts that are embeddings in place of tokens."""

REFERENCE = "inline:"
"""The beginning of what stands for a file that was cut out of a body."""

Content = str | list[dict[str, str]] | None


class MediaFile(msgspec.Struct, frozen=True):
    """The file of one media item, not decoded."""

    data: bytes | bytearray | memoryview
    is_base64: bool = False
    """Whether `data` is still written in base64, which the process that decodes it undoes."""


class MediaPart(msgspec.Struct, frozen=True):
    """A media item as a message names it. Equal parts of a request are the same item."""

    kind: Kind
    url: str | None
    """The place of its file, or of embeddings the file in base64; None if only its name is given."""
    low_detail: bool = False
    uuid: str | None = None
    """The client's name for it, by which later requests can refer to it."""
    grid: str | None = None
    """The grid of a picture that comes as embeddings, empty if the client gives none; None for others."""


def read_part(part: Mapping[str, Any]) -> dict[str, str]:
    """A media part in one form, whichever of its forms a client has written: a URL, and options beside it."""
    kind = str(part["type"])
    if kind == _EMBEDS:
        return _read_embeds(part)
    if kind == _SOUND:
        part = _with_url(part)
    field = _FIELDS[MEDIA_PARTS[kind]]
    given = part.get(field)
    inside = cast("dict[str, Any]", given) if isinstance(given, dict) else {"url": given}
    url, uuid, sent = inside.get("url"), part.get("uuid"), _SOUND if kind == _SOUND else field
    detail = inside.get("detail", part.get("detail")) or "auto"
    if (url is None and uuid is None) or not isinstance(url, str | None):
        raise BadRequest(
            f"A content part of type '{kind}' needs a URL in `{sent}`, or the `uuid` of an earlier one.",
            "messages",
        )
    if not isinstance(uuid, str | None) or detail not in _DETAILS:
        raise BadRequest(
            f"The `uuid` of a content part is a string, and its `detail` one of {', '.join(_DETAILS)}.",
            "messages",
        )
    found = {"type": field, field: url, "uuid": uuid, "detail": "low" if detail == "low" else None}
    return {name: value for name, value in found.items() if value is not None}


def is_reference(data: str) -> bool:
    """Whether a string stands for a file that was cut out of a body. No base64 reads like that."""
    return data.startswith(REFERENCE)


def _with_url(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part of sound in base64, as one with a data URL. A reference to a long file stands for itself."""
    given = part.get(_SOUND)
    inside = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    data = inside.get("data")
    if data is None and part.get("uuid") is not None:
        return dict(part)
    if not isinstance(data, str) or not data:
        raise BadRequest(
            f"A content part of type '{_SOUND}' needs an object `{_SOUND}` with the file in base64 as "
            "`data`, and may have its `format`.",
            "messages",
        )
    is_url = is_reference(data) or data.startswith("data:")
    return {**part, _FIELDS["audio"]: data if is_url else f"data:audio;base64,{data}"}


def _read_embeds(part: Mapping[str, Any]) -> dict[str, str]:
    given, uuid = part.get(_EMBEDS), part.get("uuid")
    inside = cast("dict[str, Any]", given) if isinstance(given, dict) else {_EMBEDS: given}
    file, grid = inside.get(_EMBEDS), inside.get(_GRID) or ""
    if isinstance(grid, list) and len(cast("list[object]", grid)) == 3:
        grid = ",".join(map(str, cast("list[object]", grid)))
    strings = isinstance(file, str | None) and isinstance(uuid, str | None)
    strings = strings and isinstance(grid, str) and grid.isascii()
    if not strings or file is uuid is None or inside.keys() - {_EMBEDS, _GRID}:
        raise BadRequest(
            f"A content part of type '{_EMBEDS}' needs a file in base64 in `{_EMBEDS}`, an object with that "
            f"and `{_GRID}`, or the `uuid` of an earlier one.",
            "messages",
        )
    found = {"type": _EMBEDS, _EMBEDS: file, "uuid": uuid, _GRID: grid}
    return {name: value for name, value in found.items() if value is not None}


def read_rows_part(part: Mapping[str, Any]) -> dict[str, str]:
    """A part of embeddings in place of tokens."""
    file = part.get("data")
    if not isinstance(file, str) or not file:
        raise BadRequest(f"A content part of type '{ROWS}' needs a file in base64 in `data`.", "messages")
    return {"type": ROWS, "data": file}


def check_embeds(facts: MediaFacts | None) -> None:
    """Refuses pictures that are embeddings, unless the operator takes them."""
    if facts is None or not facts.takes_embeds:
        raise BadRequest(
            "image_embeds are not allowed: the operator has to give --enable-mm-embeds "
            "(enable_mm_embeds=True).",
            "messages",
        )


def has_media(content: Content) -> bool:
    """Whether a content has parts that are no text."""
    return isinstance(content, list) and any(part["type"] != "text" for part in content)


def find_parts(contents: Iterable[Content], facts: MediaFacts | None) -> list[MediaPart]:
    """The media parts of messages, in order. Refuses those that the model does not take, and too many."""
    parts = [part for content in contents if isinstance(content, list) for part in content]
    if any(part["type"] == ROWS for part in parts):
        raise BadRequest(f"{ROWS} are parts of chats, which are answered: give texts here.", "messages")
    found = [part for part in parts if part["type"] in MEDIA_PARTS]
    if not found:
        return []
    most = {} if facts is None else facts.most
    for part in found:
        if MEDIA_PARTS[part["type"]] not in most:
            *others, last = "text", *(_PLURALS[kind] for kind in most)
            kinds = f"{', '.join(others)} and {last} are" if others else f"{last} is"
            refused = _PLURALS[MEDIA_PARTS[part["type"]]]
            raise BadRequest(
                f"Content parts with {refused} are not supported by this model, only {kinds}.",
                "messages",
            )
        if part["type"] == _EMBEDS:
            check_embeds(facts)
    for kind, count in Counter(MEDIA_PARTS[part["type"]] for part in found).items():
        if count > most[kind]:
            raise BadRequest(
                f"At most {most[kind]} {kind}(s) may be provided in one prompt, and these messages have "
                f"{count}. The operator sets this with --limit-mm-per-prompt.",
                "messages",
            )
    return list(map(media_part, found))


def media_part(part: Mapping[str, str]) -> MediaPart:
    """The item that a part of a message names."""
    kind, low = part["type"], part.get("detail") == "low"
    return MediaPart(MEDIA_PARTS[kind], part.get(kind), low, part.get("uuid"), part.get(_GRID))
