"""Pieces of grammars in llguidance's form of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from server.errors import BadRequest

ANY_TEXT = "/(?s:.*)/"

_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_PRINTABLE_ASCII = 0x80
_LARGEST = 0x10FFFF


def literal(text: str, tokens: Mapping[str, int]) -> str:
    """A text that must stand there, with its special tokens as such; `tokens` are the ids of these."""
    pieces: list[str] = []
    for piece in split(text, tokens):
        pieces.append(token(tokens[piece]) if piece in tokens else quoted(piece))
    return " ".join(pieces) or '""'


def token(id: int) -> str:
    return f"<[{id}]>"


def token_but(ids: Sequence[int]) -> str:
    """Any token but these."""
    return f"<[^{','.join(map(str, ids))}]>" if ids else "<[*]>"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def regex(pattern: str) -> str:
    """A regular expression between slashes."""
    # Slashes that are escaped stay so, as each escape is passed over as a whole.
    escaped = re.sub(r"\\.|/|\n", lambda found: {"/": "\\/", "\n": "\\n"}.get(found[0], found[0]), pattern)
    return f"/{escaped}/"


def text_without(excluded: Sequence[str]) -> str:
    """A terminal for any text in which none of these texts is."""
    if not excluded:
        return ANY_TEXT
    inside = regex("(?s:.*)(" + "|".join(map(exactly, excluded)) + ")(?s:.*)")
    return f"{ANY_TEXT} & ~{inside}"


def from_choice(choice: Sequence[str]) -> str:
    return "start: " + " | ".join(quoted(text) for text in dict.fromkeys(choice)) + "\n"


def from_grammar(text: str, param: str) -> str:
    """A client's grammar, EBNF as llama.cpp writes it or Lark already, as Lark."""
    if "x-guidance" in text:
        raise BadRequest("A grammar must not hold `x-guidance`: these options are the server's.", param)
    if "::=" not in text:
        return text
    # Only in the process that proves grammars, where one that takes too long harms nobody.
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(_ESCAPED.sub(_unescaped, text))
    except RecursionError:
        raise BadRequest("The grammar is nested too deep.", param) from None
    except Exception as error:  # the library raises plain Exception
        raise BadRequest(f"The grammar is no EBNF: {str(error)[:200]}", param) from None


def exactly(text: str) -> str:
    """A regular expression of exactly this text."""
    return "".join(
        char if char.isalnum() or ord(char) >= _PRINTABLE_ASCII else f"\\x{ord(char):02x}" for char in text
    )


def _unescaped(found: re.Match[str]) -> str:
    """A character in place of its number, which the library would write wrongly."""
    if found[3] is not None:
        return found[0]
    code = int(found[1] or found[2], 16)
    if code < _PRINTABLE_ASCII:
        return f"\\x{code:02x}"
    return chr(code) if code <= _LARGEST and not 0xD800 <= code < 0xE000 else found[0]


def split(text: str, tokens: Mapping[str, int]) -> list[str]:
    """The text cut at special tokens, the longest first."""
    names = [name for name in sorted(tokens, key=len, reverse=True) if name in text]
    if not names:
        return [text] if text else []
    return [piece for piece in re.split(f"({'|'.join(map(re.escape, names))})", text) if piece]
