"""The facts and tools with which the texts of a request's body are read."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from server.answers.dialects import AUTO, NONE
from server.answers.format_detection import find_format
from server.model_facts import Facts
from server.options.server_config import ServerConfig
from server.text.tokenizer import Tokenizer


class ReadingOptions(msgspec.Struct, frozen=True):
    """The operator's options that decide how texts are read."""

    trust_request_chat_template: bool = False
    default_chat_template_kwargs: dict[str, object] = {}
    ignore_unknown_fields: bool = False
    tool_call_parser: str = AUTO

    @classmethod
    def of(cls, config: ServerConfig) -> ReadingOptions:
        return cls(
            config.trust_request_chat_template,
            config.default_chat_template_kwargs,
            config.ignore_unknown_fields,
            config.tool_call_parser,
        )


A_LOT = 1 << 40
"""More work than is done in the event loop, in characters."""


@dataclass(frozen=True, slots=True)
class ReadingContext:
    facts: Facts
    tokenizer: Tokenizer
    options: ReadingOptions

    @property
    def knows_no_calls(self) -> bool:
        """Whether no form is known in which the model writes calls, though one was looked for."""
        parser = self.options.tool_call_parser
        return parser == AUTO and find_format(self.tokenizer, parser, NONE).dialect is None
