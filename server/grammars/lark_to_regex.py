"""A client's Lark grammar as one regular expression, if no rule of it leads back to itself.

The input of a custom tool stands in a JSON string, where quotes and line ends are escaped. Of a regular
expression the grammar engine makes the escaped form itself, of a grammar it does not. Grammars of tools, such
as one for patches or for queries, mostly repeat and choose without nesting, so that one expression says the
same.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence

from server.grammars.grammar_limits import LONGEST_REGEX, LONGEST_SCHEMA
from server.grammars.lark import exactly

COMMON: Mapping[str, str] = {
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "CR": r"\r",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "DIGIT": "[0-9]",
    "ESCAPED_STRING": r'"(?:[^"\\]|\\.)*"',
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "LETTER": "[A-Za-z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_INT": "[+-]?[0-9]+",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[A-Za-z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
"""Lark's own terminals that a grammar may import."""

_DEEPEST = 64
"""How many rules and groups may lie within each other."""

_ESCAPED = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "b": "\b", "a": "\a", "0": "\0"}
_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r\n]+(?:[?!]+(?=[a-z_]))?|//[^\n]*)
    |(?P<string>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?:[^/\\\n]|\\.)+/[imsx]*)
    |(?P<directive>%[a-z]+)
    |(?P<name>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<number>[0-9]+)
    |(?P<mark>->|\.\.|[:|()\[\]{}?*+~,.])""",
    re.VERBOSE,
)


class NotRegular(Exception):
    """A grammar that no regular expression says, or not one of bounded length."""


def regex_of(grammar: str) -> str:
    """The expression of all texts of this grammar. Raises NotRegular."""
    if len(grammar) > LONGEST_SCHEMA:
        raise NotRegular("it is too long")
    return _Grammar(_tokens(grammar)).regex()


def _tokens(grammar: str) -> list[str]:
    """The tokens of a grammar, whose kinds their first characters tell."""
    found: list[str] = []
    text, at = "\n" + grammar, 0  # a modifier of the first rule follows the end of a line, too
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None or token.lastgroup is None:
            raise NotRegular(f"{text[at : at + 20]!r} is not understood")
        if token.lastgroup != "skip":
            found.append(token.group())
        at = token.end()
    return found


class _Grammar:
    def __init__(self, tokens: Sequence[str]) -> None:
        self._bodies: dict[str, Sequence[str]] = {}
        self._known: dict[str, str] = {}
        """The expressions of rules and terminals, as far as they are asked for."""
        self._open: list[str] = []
        """The rules that are being written, each within the one before."""
        self._ignored: list[Sequence[str]] = []
        self._read(tokens)
        bodies = [_Body(self, body, "").whole() for body in self._ignored]
        self.space = f"(?:{'|'.join(bodies)})*" if bodies else ""
        """What may stand between any two terminals of rules."""
        self._known = {name: text for name, text in self._known.items() if name not in self._bodies}

    def regex(self) -> str:
        return self.space + self.named("start")

    def named(self, name: str) -> str:
        """The expression of a rule or terminal."""
        if (known := self._known.get(name)) is not None:
            return known
        if name not in self._bodies:
            raise NotRegular(f"{name} is not defined")
        if name in self._open or len(self._open) > _DEEPEST:
            raise NotRegular(f"{name} leads back to itself")
        self._open.append(name)
        found = _Body(self, self._bodies[name], "" if name.isupper() else self.space).whole()
        self._open.pop()
        self._known[name] = found
        return found

    def _read(self, tokens: Sequence[str]) -> None:
        """Cut the grammar into its statements."""
        starts = [at for at in range(len(tokens)) if _begins_statement(tokens, at)]
        if not starts or starts[0]:
            raise NotRegular("it does not begin with a rule")
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            match tokens[start:end]:
                case ["%ignore", *rest]:
                    self._ignored.append(rest)
                case ["%import", *rest]:
                    self._import(rest)
                case [name, *rest] if _is_name(name):
                    self._bodies[name] = rest[rest.index(":") + 1 :]
                case [directive, *_]:
                    raise NotRegular(f"{directive} is not understood")
                case _:
                    pass

    def _import(self, words: list[str]) -> None:
        match words:
            case ["common", ".", name]:
                names = {name: name}
            case ["common", ".", name, "->", other]:
                names = {other: name}
            case ["common", "(", *listed, ")"]:
                names = {name: name for name in listed if name != ","}
            case _:
                raise NotRegular(f"%import {' '.join(words)} is not understood")
        for known, name in names.items():
            if name not in COMMON:
                raise NotRegular(f"{name} is not known")
            self._known[known] = COMMON[name]


def _begins_statement(tokens: Sequence[str], at: int) -> bool:
    """Whether a directive stands here, or a name with a colon behind it and perhaps a priority between."""
    if _is_name(tokens[at]):
        behind = tokens[at + 1 : at + 4]
        return behind[:1] == [":"] or (behind[:1] == ["."] and behind[2:] == [":"])
    return tokens[at].startswith("%")


def _is_name(token: str) -> bool:
    return token[0].isalpha() or token[0] == "_"


class _Body:
    """Reads the right side of a rule."""

    def __init__(self, grammar: _Grammar, tokens: Sequence[str], space: str) -> None:
        self._grammar = grammar
        self._tokens = tokens
        self._space = space
        self._at = self._depth = 0

    def whole(self) -> str:
        found = self._choice()
        if self._at < len(self._tokens):
            raise NotRegular(f"{self._next!r} is not understood")
        return f"(?:{found})"

    @property
    def _next(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self, *texts: str) -> str:
        """Take the next token if it is one of these; empty if it is not."""
        found = self._next
        if found not in texts or not found:
            return ""
        self._at += 1
        return found

    def _choice(self) -> str:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise NotRegular("it is nested too deep")
        ways = [self._sequence()]
        while self._take("|"):
            ways.append(self._sequence())
        self._depth -= 1
        return _bounded("|".join(ways))

    def _sequence(self) -> str:
        found: list[str] = []
        while self._next not in ("", "|", ")", "]"):
            if self._take("->"):  # the name of an alternative
                self._at += 1
                continue
            found.append(self._item())
        return _bounded("".join(found))

    def _item(self) -> str:
        one = f"(?:{self._one()})"
        if mark := self._take("?", "*", "+"):
            return one + mark
        if self._take("~"):
            least = self._number()
            return f"{one}{{{least},{self._number() if self._take('..') else least}}}"
        if self._take("{"):
            least = most = self._number()
            if self._take(","):
                most = "" if self._next == "}" else self._number()
            self._expect("}")
            return f"{one}{{{least},{most}}}"
        return one

    def _one(self) -> str:
        if opening := self._take("(", "["):
            found = self._choice()
            self._expect(")" if opening == "(" else "]")
            return found if opening == "(" else f"(?:{found})?"
        token = self._tokens[self._at]
        self._at += 1
        if token.startswith('"') and self._take(".."):
            last = self._next or token
            self._at += 1
            return f"[{exactly(_text(token))}-{exactly(_text(last))}]" + self._space
        if token.startswith('"'):
            found = exactly(_text(token))
            return (f"(?i:{found})" if token.endswith("i") else found) + self._space
        if token.startswith("/"):
            return _between_slashes(token) + self._space
        if _is_name(token):
            return self._grammar.named(token) + (self._space if token.isupper() else "")
        raise NotRegular(f"{token!r} is not understood")

    def _number(self) -> str:
        token = self._next
        if not token.isdecimal():
            raise NotRegular("a count is missing")
        self._at += 1
        return token

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise NotRegular(f"{text!r} is missing")


def _text(token: str) -> str:
    """The text of a string between quotes."""
    if not token.startswith('"'):
        raise NotRegular(f"{token!r} is not a string")
    return _ESCAPED.sub(_unescaped, token.removesuffix("i")[1:-1])


def _unescaped(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    if code is None:
        return _CONTROLS.get(found[4], found[4])
    if int(code, 16) > sys.maxunicode:
        raise NotRegular(f"{found[0]!r} is not a character")
    return chr(int(code, 16))


def _between_slashes(token: str) -> str:
    text, _, flags = token[1:].rpartition("/")
    text = text.replace("\\/", "/")
    return f"(?{flags}:{text})" if flags else f"(?:{text})"


def _bounded(regex: str) -> str:
    if len(regex) > LONGEST_REGEX:
        raise NotRegular("it is too long as one regular expression")
    return regex
