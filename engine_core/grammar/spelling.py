"""The vocabulary as grammars see it: the bytes of each token, and how the model would write a text.

Where a grammar leaves no choice of bytes, llguidance lets through only the tokens that the model's own
tokenizer makes of them, so it must be able to ask for these.
"""

from __future__ import annotations

import logging
from pathlib import Path

import tokenizers
from llguidance import LLTokenizer, TokenizerWrapper

from engine_core.protocol import Spelling

_log = logging.getLogger(__name__)


def make_vocabulary(spelling: Spelling, size: int, folder: str) -> LLTokenizer:
    """The vocabulary of a model with so many tokens. It takes a second for a hundred thousand of them.

    `folder` is the checkpoint's on this machine, in case the server's tokenizer.json is on another one. If
    the model has no token that ends an answer, one is added behind all others.
    """
    tokens = [*spelling.tokens[:size], *[b""] * (size - len(spelling.tokens))]
    special, ends = [id for id in spelling.special if id < size], [id for id in spelling.ends if id < size]
    if not ends:
        ends = [size]
        special.append(size)
        tokens.append(b"</s>")
    encoder = _Encoder(_open_tokenizer(spelling.tokenizer, folder), tokens, special, ends[0])
    return LLTokenizer(encoder, eos_token=ends)


def _open_tokenizer(path: str, folder: str) -> tokenizers.Tokenizer | None:
    for found in (Path(path), Path(folder) / "tokenizer.json"):
        if found.is_file():
            tokenizer = tokenizers.Tokenizer.from_file(str(found))
            tokenizer.no_truncation()
            tokenizer.no_padding()
            tokenizer.encode_special_tokens = True  # a text may spell the name of one
            return tokenizer
    _log.warning("there is no tokenizer.json here: under a grammar, words may be cut in unusual places")
    return None


class _Encoder(TokenizerWrapper):
    """What llguidance asks of a tokenizer: its tokens, and the ids of a text."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer | None, tokens: list[bytes], special: list[int], end: int
    ) -> None:
        self.is_tokenizer_wrapper = True
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end
        self.bos_token_id = None
        self._tokenizer = tokenizer
        self._own: dict[bytes, int] = {}
        if tokenizer is None:
            hidden = set(special)
            self._own = {data: id for id, data in enumerate(tokens) if data and id not in hidden}
            self._longest = max(map(len, self._own), default=0)

    def __call__(self, s: str) -> list[int]:
        if self._tokenizer is not None:
            return self._tokenizer.encode(s, add_special_tokens=False).ids
        return self._longest_first(s.encode())

    def _longest_first(self, data: bytes) -> list[int]:
        """The text in the longest tokens from its beginning on, which any grammar can follow."""
        ids: list[int] = []
        while data:
            cuts = range(min(self._longest, len(data)), 0, -1)
            cut = next((cut for cut in cuts if data[:cut] in self._own), None)
            if cut is None:
                return ids  # a byte that no token has
            ids.append(self._own[data[:cut]])
            data = data[cut:]
        return ids
