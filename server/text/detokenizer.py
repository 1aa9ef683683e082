"""Turns token ids into text while they arrive, with one state for each stream.

The work is in proportion to the new text only. Joined, the pieces equal the text of all tokens at once, and
no piece ends inside a character. Two exact kinds cover nearly every causal model: byte-level BPE, and
SentencePiece with its spaces and byte fallback. Both come down to "bytes of a token, then UTF-8", read from
tokenizer.json. All others use `WindowText`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import msgspec

from models.checkpoint.marian_tokenizer import MARK

BROKEN = "\ufffd"

FIRST_MARK = 0xD800
"""The first of the marks: single characters that stand for special tokens while an answer is read. They are
lone surrogates, which text decoded from UTF-8 never has."""
MOST_MARKS = 0x800


def is_mark(text: str) -> bool:
    """Whether a text is the mark of a special token."""
    return len(text) == 1 and FIRST_MARK <= ord(text) < FIRST_MARK + MOST_MARKS


def _one_mark_per_byte(error: UnicodeError) -> tuple[str, int]:
    """An error handler: SentencePiece's byte fallback shows each byte that is no character as one U+FFFD."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return BROKEN * (error.end - error.start), error.end


codecs.register_error("facet-byte-fallback", _one_mark_per_byte)


class ByteDecoding(msgspec.Struct, frozen=True):
    """The rules by which a tokenizer's tokens become bytes, and these text."""

    token_bytes: Callable[[str], bytes]
    errors: str = "replace"
    """The error handler of `codecs` for bytes that are no UTF-8."""
    strip: int = 0
    """Spaces dropped at the start of a text; -1 drops all of the first token's."""


class TextState(Protocol):
    """The text of one stream while it grows."""

    def push(self, ids: Iterable[int]) -> str: ...
    def flush(self) -> str:
        """Returns the text that was held back, now that nothing follows."""
        ...


class ByteText:
    """The text of tokens that are bytes: a table look-up, and UTF-8 that may end inside a character."""

    __slots__ = ("_begun", "_errors", "_lookup", "_strip")

    def __init__(self, decoding: ByteDecoding, lookup: Callable[[int], bytes], *, at_start: bool) -> None:
        self._lookup = lookup
        self._errors = decoding.errors
        self._begun = b""
        """The first bytes of a character that is not complete yet."""
        self._strip = decoding.strip if at_start else 0

    def push(self, ids: Iterable[int]) -> str:
        if self._strip:
            return self._push_first(list(ids))
        data = self._begun + b"".join(map(self._lookup, ids))
        text, used = codecs.utf_8_decode(data, self._errors, False)
        self._begun = data[used:]
        return text

    def _push_first(self, ids: list[int]) -> str:
        """Drops the space that SentencePiece writes before the first word of a text."""
        for i, id in enumerate(ids):
            data = self._lookup(id)
            if data:
                spaces = len(data) - len(data.lstrip(b" "))
                data = data[min(spaces, self._strip) if self._strip > 0 else spaces :]
                self._strip = 0
                self._begun = data
                return self.push(ids[i + 1 :])
        return ""

    def flush(self) -> str:
        data, self._begun = self._begun, b""
        return codecs.utf_8_decode(data, self._errors, True)[0]


class MarkedText:
    """The text of another state, with characters of our own in place of some tokens."""

    __slots__ = ("_marks", "_text", "widths")

    def __init__(self, text: TextState, marks: Mapping[int, str]) -> None:
        self._text = text
        self._marks = marks
        self.widths: list[int] = []
        """The characters that each token has added to the text, until somebody takes the list."""

    def push(self, ids: Iterable[int]) -> str:
        shown = ""
        for id in ids:
            if mark := self._marks.get(id):
                piece = self._text.flush() + mark
            else:
                piece = self._text.push((id,))
            shown += piece
            self.widths.append(len(piece))
        return shown

    def flush(self) -> str:
        return self._text.flush()


class WindowText:
    """The text of any decoder: decodes the last few tokens with and without the new ones, and takes the rest.

    This is right whenever the text of a token depends on its neighbours only, which holds for every decoder
    of the `tokenizers` library that a language model uses.
    """

    __slots__ = ("_decode", "_shown", "_tokens", "_visible")

    CONTEXT = 4
    LOOK_BACK = 16
    """How many tokens of the prompt are searched for the first context."""

    def __init__(
        self, decode: Callable[[list[int]], str], visible: Callable[[int], bool], before: Iterable[int] = ()
    ) -> None:
        self._decode = decode
        self._visible = visible
        self._tokens = [id for id in before if visible(id)][-self.CONTEXT :]
        self._shown = decode(self._tokens)

    def push(self, ids: Iterable[int]) -> str:
        new = [id for id in ids if self._visible(id)]
        if not new:
            return ""
        self._tokens += new
        text = self._decode(self._tokens)
        if text.endswith(BROKEN) or not text.startswith(self._shown):
            return ""
        piece = text[len(self._shown) :]
        self._tokens = self._tokens[-self.CONTEXT :]
        self._shown = self._decode(self._tokens)
        return piece

    def flush(self) -> str:
        shown, self._shown = self._shown, self._decode(self._tokens)
        return self._shown[len(shown) :]


def byte_level_table() -> dict[str, int]:
    """GPT-2's alphabet: a printable character for each byte, in which byte-level vocabularies are written."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


_BYTE_OF = byte_level_table()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a token. Added tokens are plain text and may have characters outside the alphabet."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return metaspace_bytes(token)


def metaspace_bytes(token: str) -> bytes:
    return token.replace("▁", " ").encode()


def byte_decoding(decoder: object) -> ByteDecoding | None:
    """The exact decoding for the `decoder` section of a tokenizer.json; None if it is of another kind."""
    steps = _steps(decoder)
    match [step.get("type") for step in steps]:
        case ["ByteLevel"]:
            return ByteDecoding(byte_level_bytes)
        case ["Metaspace"] if steps[0].get("replacement") == "▁":
            keeps = steps[0].get("prepend_scheme", "always") == "never"
            return ByteDecoding(metaspace_bytes, strip=0 if keeps else -1)
        case ["Replace", "Metaspace"] if steps[0].get("pattern") == {"String": MARK}:
            return ByteDecoding(lambda token: metaspace_bytes(token.removeprefix(MARK)), strip=-1)
        case ["Replace", "ByteFallback", "Fuse"] if _is_space_mark(steps[0]):
            return ByteDecoding(sentencepiece_bytes, "facet-byte-fallback")
        case ["Replace", "ByteFallback", "Fuse", "Strip"] if _is_space_mark(steps[0]):
            strip = steps[3].get("start") if steps[3].get("content") == " " else 0
            spaces = strip if isinstance(strip, int) else 0
            if steps[3].get("stop"):
                return None
            return ByteDecoding(sentencepiece_bytes, "facet-byte-fallback", spaces)
        case _:
            return None


def _steps(decoder: object) -> list[dict[str, object]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for part in decoder.get("decoders", []) for step in _steps(part)]


def _is_space_mark(step: dict[str, object]) -> bool:
    return step.get("pattern") == {"String": "▁"} and step.get("content") == " "
