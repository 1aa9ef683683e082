"""Random texts of a grammar: walks through what llguidance allows, over a small vocabulary."""

import random
from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

_PIECES = ["</parameter>", '"', '", "', "\n", "true", "12", ' "', '": "', "</arg_value>", "</", ">", "}", "]"]
_PIECES += [")", "=", "null", "]<]minimax[>[", '<|"|>', "<escape>"]
_CLOSERS = b'"}])>'


class Vocabulary:
    """All bytes, some longer pieces, an end, and special tokens."""

    def __init__(self, specials: Sequence[str] = ()) -> None:
        texts = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in _PIECES]
        self.eos_token_id, self.bos_token_id = len(texts), None
        self.tokens = [*texts, b"<eos>", *(name.encode() for name in specials)]
        self.specials = {len(texts) + 1 + number: name for number, name in enumerate(specials)}
        self.special_token_ids = [self.eos_token_id, *self.specials]
        self._longest_first = sorted(enumerate(texts), key=lambda entry: -len(entry[1]))
        self.tokenizer = LLTokenizer(TokenizerWrapper(self))

    def __call__(self, text: bytes | str) -> list[int]:
        """The text as tokens, the longest that fits first."""
        left = text.encode() if isinstance(text, str) else text
        found: list[int] = []
        while left:
            id, piece = next(entry for entry in self._longest_first if left.startswith(entry[1]))
            found.append(id)
            left = left[len(piece) :]
        return found

    def text(self, ids: Sequence[int], marks: dict[int, str]) -> str:
        """The text of tokens, with marks in place of special ones."""
        shown, data = "", b""
        for id in ids:
            if id in self.specials:
                shown, data = shown + data.decode("utf-8", "replace") + marks[id], b""
            elif id != self.eos_token_id:
                data += self.tokens[id]
        return shown + data.decode("utf-8", "replace")

    def weight(self, id: int) -> float:
        """How often a token is drawn: those that end things often, or no text would end."""
        piece = self.tokens[id]
        if id in self.specials:
            return 30.0
        if len(piece) > 1:
            return 12.0
        return 8.0 if piece in _CLOSERS else 1.0 if b" " <= piece < b"\x7f" or piece == b"\n" else 0.02


def walk(vocabulary: Vocabulary, grammar: str, seed: random.Random, *, most: int = 1000) -> list[int] | None:
    """The tokens of a random text; None if it does not end within `most`. Raises ValueError if stuck.

    The grammar is Lark, or several grammars as llguidance has them in JSON.
    """
    matcher = _matcher(vocabulary, grammar)
    written: list[int] = []
    while not matcher.is_stopped():
        if matcher.is_error() or len(written) > most:
            break
        bits = matcher.compute_bitmask()
        allowed = [id for id in range(len(vocabulary.tokens)) if bits[id >> 3] >> (id & 7) & 1]
        if vocabulary.eos_token_id in allowed and (len(allowed) == 1 or seed.random() < 0.5):
            break
        allowed = [id for id in allowed if id != vocabulary.eos_token_id]
        [token] = seed.choices(allowed, [vocabulary.weight(id) for id in allowed])
        matcher.consume_token(token)
        written.append(token)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return written if len(written) <= most else None


def accepts(vocabulary: Vocabulary, grammar: str, text: Sequence[int | str]) -> bool:
    """Whether a text, of which numbers are special tokens, is in the language.

    The grammar is Lark, or several grammars as llguidance has them in JSON.
    """
    matcher = _matcher(vocabulary, grammar)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    ids = [id for part in text for id in ([part] if isinstance(part, int) else vocabulary(part))]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def _matcher(vocabulary: Vocabulary, grammar: str) -> LLMatcher:
    known = grammar if grammar.startswith("{") else LLMatcher.grammar_from_lark(grammar)
    return LLMatcher(vocabulary.tokenizer, known, log_level=0)
