"""The facts and tools with which the texts of a request's body are read."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from server.options.table import ServerConfig
from server.requests.facts import Facts
from server.text.tokenizer import Tokenizer


class ReadingOptions(msgspec.Struct, frozen=True):
    """The operator's options that decide how texts are read."""

    trust_request_chat_template: bool = False
    default_chat_template_kwargs: dict[str, object] = {}
    ignore_unknown_fields: bool = False

    @classmethod
    def of(cls, config: ServerConfig) -> ReadingOptions:
        return cls(
            config.trust_request_chat_template,
            config.default_chat_template_kwargs,
            config.ignore_unknown_fields,
        )


A_LOT = 1 << 40
"""More work than is done in the event loop, in characters."""


@dataclass(frozen=True, slots=True)
class Reader:
    facts: Facts
    tokenizer: Tokenizer
    options: ReadingOptions
