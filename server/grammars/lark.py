"""Writes grammars in llguidance's form of Lark, in which special tokens stand as such."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from server.errors import BadRequest

ANY_TEXT = "/(?s:.*)/"
WHITESPACE = r"[ \n\r\t]{0,20}"
"""Whitespace between tokens of JSON. A model that could write as much as it likes may never stop."""

_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ANY = re.compile(r'"(?:\\.|[^"\\])*+"?|\[(?:\\.|[^\]\\])*+\]?|#[^\n]*|\.', re.DOTALL)
"""The dot of EBNF, or a literal, a class or a comment, in which a dot is none."""
_OPERATOR = re.compile(r"([&~-])\1")
"""Characters of a class that would combine two of them, in an expression."""
_PRINTABLE_ASCII = 0x80
_LARGEST = 0x10FFFF


class LarkGrammar:
    """A grammar under way. Its methods return expressions, which may use the rules that they have added."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        """`tokens`: the ids of special tokens by the texts, or marks, that stand for them in literals."""
        self._tokens = tokens
        self._longest_first = sorted(tokens, key=len, reverse=True)
        self._rules: list[str] = []
        self._named: dict[str, str] = {}

    def text(self, start: str, *more: str) -> str:
        """The whole grammar. `start` is the expression of the answer; `more` are rules with their names."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules, *more, ""])

    def rule(self, expression: str, *, terminal: bool = False) -> str:
        """The name of a rule for this expression, which is added unless it is there."""
        if (name := self._named.get(expression)) is None:
            name = self._named[expression] = f"{'T' if terminal else 'r'}{len(self._rules)}"
            self._rules.append(f"{name}: {expression}")
        return name

    def literal(self, text: str) -> str:
        """This very text, with its special tokens as such; empty if it is empty."""
        pieces = self._pieces(text)
        return " ".join(token(self._tokens[one]) if one in self._tokens else quoted(one) for one in pieces)

    def one_of(self, expressions: Iterable[str]) -> str:
        distinct = list(dict.fromkeys(expressions))
        return distinct[0] if len(distinct) == 1 else self.rule(" | ".join(distinct))

    def sequence(self, *expressions: str) -> str:
        return self.rule(" ".join(each for each in expressions if each))

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON of a schema, which has llguidance's options in it."""
        return self.rule("%json " + json.dumps(schema))

    def text_without(self, excluded: Iterable[str]) -> str:
        """Any text without these; of one with a special token, without what comes before that."""
        firsts = [self._pieces(each)[0] for each in excluded if each]
        texts = [each for each in firsts if each not in self._tokens]
        inside = "|".join(map(exactly, texts))
        return self.rule(f"{ANY_TEXT} & ~/(?s:.*)({inside})(?s:.*)/" if texts else ANY_TEXT, terminal=True)

    def until(self, text: str, end: str) -> str:
        """Text that `text_without` has made, and the literal that ends it, of which it was made."""
        first, *rest = self._pieces(end)
        behind = self.literal("".join(rest))
        if first in self._tokens:
            return f"{text} {self.literal(first)} {behind}".rstrip()
        # One terminal, because the lexer does not go back to find where the text has ended.
        return f"{self.rule(f'{text} {quoted(first)}', terminal=True)} {behind}".rstrip()

    def has_token(self, literal: str) -> bool:
        return any(piece in self._tokens for piece in self._pieces(literal))

    def _pieces(self, text: str) -> list[str]:
        """The text cut at special tokens, the longest first."""
        names = [name for name in self._longest_first if name in text]
        if not names:
            return [text] if text else []
        return [piece for piece in re.split(f"({'|'.join(map(re.escape, names))})", text) if piece]


def token(id: int) -> str:
    return f"<[{id}]>"


def token_but(ids: Sequence[int]) -> str:
    """Any token but these."""
    return f"<[^{','.join(map(str, ids))}]>" if ids else "<[*]>"


def quoted(text: str) -> str:
    # Of what JSON leaves as it is, llguidance's lexer does not take U+007F.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def regex(pattern: str) -> str:
    """A regular expression between slashes."""
    # Slashes that are escaped stay so, as each escape is passed over as a whole.
    escaped = re.sub(r"\\.|/|\n", lambda found: {"/": "\\/", "\n": "\\n"}.get(found[0], found[0]), pattern)
    return f"/{escaped}/"


def exactly(text: str) -> str:
    """A regular expression of exactly this text."""
    return "".join(
        char if char.isalnum() or ord(char) >= _PRINTABLE_ASCII else f"\\x{ord(char):02x}" for char in text
    )


def from_choice(choice: Sequence[str]) -> str:
    return "start: " + " | ".join(quoted(text) for text in dict.fromkeys(choice)) + "\n"


def from_grammar(text: str, param: str) -> str:
    """A client's grammar, EBNF as llama.cpp writes it or Lark already, as Lark."""
    if "x-guidance" in text:
        raise BadRequest("A grammar must not hold `x-guidance`: these options are the server's.", param)
    if "::=" not in text:
        return text
    # Only in the process that checks grammars, where one that takes too long harms nobody.
    from llguidance.gbnf_to_lark import gbnf_to_lark

    text = _ANY.sub(_for_library, _ESCAPED.sub(_unescaped, text))
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise BadRequest("The grammar is nested too deep.", param) from None
    except Exception as error:  # the library raises plain Exception
        raise BadRequest(f"The grammar is not EBNF: {str(error)[:200]}", param) from None


def _for_library(found: re.Match[str]) -> str:
    """A part of EBNF, of which the library makes what llama.cpp understands by it."""
    part = found[0]
    if part == ".":  # which is any character, also a line feed
        return r"[^\x00]"
    return _OPERATOR.sub(lambda one: f"{one[1]}\\x{ord(one[1]):02x}", part) if part[0] == "[" else part


def _unescaped(found: re.Match[str]) -> str:
    """A character in place of its number, which the library would write wrongly."""
    if found[3] is not None:
        return found[0]
    code = int(found[1] or found[2], 16)
    if code < _PRINTABLE_ASCII:
        return f"\\x{code:02x}"
    return chr(code) if code <= _LARGEST and not 0xD800 <= code < 0xE000 else found[0]
