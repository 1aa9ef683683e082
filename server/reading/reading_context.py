"""What texts are read with: facts of the model, its tokenizer, the operator's options, prepared media."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from server.errors import BadRequest
from server.media.media_parts import MediaPart, find_parts
from server.media.prompt import UNREAD, LaidMedia, MediaNeeded
from server.model_facts import Facts
from server.options.server_flags import ServerConfig
from server.output_parsing.format_detection import find_format
from server.output_parsing.tool_call_dialects import AUTO, NONE
from server.requests.decisions import ORDERS
from server.schemas.messages import Message, TemplateOptions
from server.schemas.repaired_history import WRITTEN
from server.schemas.sampling_fields import RequestBody
from server.text.chat_template import AskedFormat
from server.text.tokenizer import Tokenizer


class ReadingOptions(msgspec.Struct, frozen=True):
    """The operator's options that decide how texts are read."""

    trust_request_chat_template: bool = False
    default_chat_template_kwargs: dict[str, object] = {}
    strict_fields: bool = False
    tool_call_parser: str = AUTO
    trust_request_mm_kwargs: bool = False
    content_format: AskedFormat | None = None
    """The form of contents in templates, in place of the tokenizer's."""
    decide_orders: int = ORDERS

    @classmethod
    def of(cls, config: ServerConfig) -> ReadingOptions:
        return cls(
            config.trust_request_chat_template,
            config.default_chat_template_kwargs,
            config.strict_fields,
            config.tool_call_parser,
            config.media.trust_request_mm_kwargs,
            decide_orders=config.decisions.decide_orders,
        )


@dataclass(frozen=True, slots=True)
class ReadingContext:
    facts: Facts
    tokenizer: Tokenizer
    options: ReadingOptions
    media: LaidMedia = field(default_factory=dict)
    """The items of the request that are prepared. Reading one that is not raises MediaNeeded."""

    @property
    def unread(self) -> set[MediaPart]:
        """Media of tools that could not be read."""
        return {part for part, laid in self.media.items() if laid == UNREAD}

    def need_media(
        self, conversations: Iterable[Sequence[Message]], options: TemplateOptions
    ) -> list[MediaPart]:
        """The media of all conversations. Raises MediaNeeded if some are not prepared."""
        facts, parts, of_others = self.facts.media, list[MediaPart](), set[MediaPart]()
        for messages in conversations:
            parts += find_parts([message.content for message in messages], facts)
            said = [each.content for each in messages if each.role not in WRITTEN]
            of_others.update(find_parts(said, facts))
        if parts and any(part not in self.media for part in parts):
            if not self.options.trust_request_mm_kwargs:
                _refuse_settings(options)
            settings, io = options.mm_processor_kwargs or {}, options.media_io_kwargs or {}
            salt = options.cache_salt if isinstance(options, RequestBody) else None
            of_tools = [part for part in parts if part not in of_others]
            raise MediaNeeded(parts, salt or "", settings, io, of_tools)
        return parts

    @property
    def knows_no_calls(self) -> bool:
        """Whether no form is known in which the model writes calls, though one was looked for."""
        parser = self.options.tool_call_parser
        return parser == AUTO and find_format(self.tokenizer, parser, NONE).dialect is None


def _refuse_settings(options: TemplateOptions) -> None:
    for name in ("mm_processor_kwargs", "media_io_kwargs"):
        if getattr(options, name):
            raise BadRequest(
                f"{name} is passed with the request, but --trust-request-mm-kwargs is not set.", name
            )
