"""Files and batches, as OpenAI's API has them: bodies, the fields of an upload, and answers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from pydantic import AfterValidator, Field, field_validator

from server.errors import BadRequest
from server.schemas.body import Body, Text, optional
from server.schemas.conversations.response_input import InputReader
from server.schemas.repaired_history import plain_json

T = TypeVar("T")

BatchPath = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/moderations",
    "/v1/decisions", "/v1/systemone",
]  # fmt: skip
"""Endpoints of which batches may be."""
LEAST_KEPT, MOST_KEPT = 3600, 30 * 86_400
"""Seconds for which a file may be kept."""
_WINDOW = re.compile(r"([1-9][0-9]{0,3})([mhd])")
_SECONDS = {"m": 60, "h": 3600, "d": 86_400}


def window_seconds(window: str) -> int:
    """The seconds of a completion window such as 24h. Raises BadRequest."""
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not 0 < seconds <= MOST_KEPT:
        raise BadRequest(
            f"completion_window: {window[:20]!r} is not a time such as 24h, 30m or 7d, and at most 30d.",
            "completion_window",
        )
    return seconds


def kept_seconds(given: Any, where: str) -> int:
    """The seconds of an object `expires_after`; the longest if there is none. Raises BadRequest."""
    match given:
        case None:
            return MOST_KEPT
        case {"anchor": "created_at", "seconds": int(seconds)} if LEAST_KEPT <= seconds <= MOST_KEPT:
            return seconds
        case _:
            raise BadRequest(
                f'{where} should be {{"anchor": "created_at", "seconds": N}}, where N is {LEAST_KEPT} to '
                f"{MOST_KEPT}.",
                where,
            )


def form_expiry(fields: dict[str, str]) -> object:
    """The object `expires_after` that the fields of a form spell, or None."""
    given = {
        name: fields[f"expires_after[{name}]"]
        for name in ("anchor", "seconds")
        if f"expires_after[{name}]" in fields
    }
    if not given:
        return None
    seconds = given.get("seconds", "")
    return {**given, "seconds": int(seconds) if seconds.isdecimal() and len(seconds) < 10 else seconds}


def _check_metadata(metadata: dict[str, str] | None) -> dict[str, str] | None:
    for name, value in (metadata or {}).items():
        if len(metadata or {}) > 16 or len(name) > 64 or len(value) > 512:
            raise BadRequest(
                "metadata may have at most 16 entries, with names of 64 characters and values of 512.",
                "metadata",
            )
    return metadata


Metadata = Annotated[dict[Text, Text] | None, AfterValidator(_check_metadata)]


class BatchRequest(Body):
    input_file_id: Text = Field(description="The id of a file with the purpose batch.")
    endpoint: BatchPath = Field(description="The url of each line.")
    completion_window: str = Field("24h", description="The time after which it expires: 24h, 30m, 7d.")
    metadata: Metadata = None
    output_expires_after: dict[str, Any] | None = optional(
        '`{"anchor": "created_at", "seconds": N}`: how long results are kept. Default: 30 days.'
    )


class ConversationUpdate(Body):
    metadata: Metadata = None


class ConversationItems(Body):
    items: list[dict[str, Any]] = Field(description="Items as in the input of /v1/responses.")

    @field_validator("items")
    @classmethod
    def check_items(cls, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for index, item in enumerate(items):
            InputReader().read(item, f"items[{index}]")
        try:
            msgspec.json.encode(items)
        except UnicodeEncodeError:  # what a tool answers may be cut within a character
            return json.loads(plain_json(json.dumps(items)))
        return items


class ConversationRequest(ConversationItems):
    items: list[dict[str, Any]] = Field([], description="The first items.")
    metadata: Metadata = None


class FileObject(msgspec.Struct, kw_only=True):
    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str = "processed"


class Deleted(msgspec.Struct):
    id: str
    deleted: bool = True
    object: str = "file"


class Page(msgspec.Struct, Generic[T], kw_only=True):
    """A part of a list, which goes on behind `last_id`."""

    object: str = "list"
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page_of(found: Sequence[tuple[str, T]], more: bool) -> Page[T]:
    """A part of a list, of entries with their ids."""
    first, last = (found[0][0], found[-1][0]) if found else (None, None)
    return Page(data=[each for _, each in found], first_id=first, last_id=last, has_more=more)
