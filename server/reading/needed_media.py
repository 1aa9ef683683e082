"""The media that have to be prepared before a prompt is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from server.errors import BadRequest
from server.media.media_parts import MediaPart, find_parts
from server.media.prompt import LaidMedia, MediaNeeded
from server.model_facts import MediaFacts
from server.schemas.messages import Message, TemplateOptions
from server.schemas.repaired_history import WRITTEN
from server.schemas.sampling_fields import RequestBody


def need_media(
    conversations: Iterable[Sequence[Message]],
    options: TemplateOptions,
    facts: MediaFacts | None,
    laid: LaidMedia,
    *,
    trusts_settings: bool,
) -> list[MediaPart]:
    """The media of all conversations. Raises MediaNeeded if some are not among the prepared ones, `laid`.
    `trusts_settings`: requests may have settings of their own for media."""
    parts, of_others = list[MediaPart](), set[MediaPart]()
    for messages in conversations:
        parts += find_parts([message.content for message in messages], facts)
        said = [each.content for each in messages if each.role not in WRITTEN]
        of_others.update(find_parts(said, facts))
    if parts and any(part not in laid for part in parts):
        if not trusts_settings:
            _refuse_settings(options)
        settings, io = options.mm_processor_kwargs or {}, options.media_io_kwargs or {}
        salt = options.cache_salt if isinstance(options, RequestBody) else None
        of_tools = [part for part in parts if part not in of_others]
        raise MediaNeeded(parts, salt or "", settings, io, of_tools)
    return parts


def _refuse_settings(options: TemplateOptions) -> None:
    for name in ("mm_processor_kwargs", "media_io_kwargs"):
        if getattr(options, name):
            raise BadRequest(
                f"{name} is passed with the request, but --trust-request-mm-kwargs is not set.", name
            )
