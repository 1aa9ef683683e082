"""The files of a tokenizer and how to read them, so that several processes can load the same one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from server.text.template import AskedFormat, ChatTemplate
from server.text.tokenizer import Tokenizer, load_tokenizer


class TokenizerSource(msgspec.Struct, frozen=True):
    folder: str
    cache: str
    chat_template: str | None = None
    content_format: AskedFormat = "auto"
    trust_remote_code: bool = False

    def load(self, make_chat: Callable[..., ChatTemplate] = ChatTemplate) -> Tokenizer:
        """Loads the tokenizer. `make_chat` takes the arguments of ChatTemplate."""
        return load_tokenizer(
            Path(self.folder),
            chat_template=self.chat_template,
            content_format=self.content_format,
            trust_remote_code=self.trust_remote_code,
            cache=Path(self.cache),
            make_chat=make_chat,
        )
