"""Tries what a grammar takes to be followed: a few short texts from its beginning, and from its parts.

A grammar may compile at once and take minutes behind a token, because its rules begin alike in many ways.
That is found here by following it over single bytes, for which there is a small budget of time. Parts are
tried as beginnings of their own, because a text drawn by chance hardly reaches the one that takes long.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from engine_core.grammar.llguidance_matcher import LIMITS, llguidance_grammar
from server.grammars.response_format import AnswerGrammar

MOST_SECONDS_EACH = 0.04
"""The most seconds of computing behind one byte. Those of real schemas take less than a tenth of it."""
SECONDS_WHOLE, SECONDS_PART, SECONDS_PARTS = 0.06, 0.03, 0.1
"""The seconds after which trials end: of the whole grammar, of a part, and of all parts together."""
_TEXTS, _BYTES = 3, 48
"""The texts that are tried of each beginning, and their bytes."""
_MOST_PARTS = 64
_MANY = 8
"""An alternative of so many is a part."""

_OPENERS = b'[{("'
_RULE = re.compile(r"^\s*([a-z_][a-z_0-9]*)\s*(?:\[[^\]]*\]\s*)?:", re.MULTILINE)
_START = re.compile(r"\bstart\b")


class Trial:
    """Tries grammars over bytes, and the special tokens that they name."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        """`tokens` are the ids of special tokens."""
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(tokens)))

    def finds(self, grammar: AnswerGrammar) -> str:
        """Why a grammar takes too long to be followed; empty if it was not found to."""
        whole = llguidance_grammar(grammar.kind, grammar.text)
        if found := self._try(whole, SECONDS_WHOLE):
            return found
        until = time.thread_time() + SECONDS_PARTS
        for part in _parts(grammar):
            if time.thread_time() > until:
                break
            if found := self._try(part, SECONDS_PART):
                return found
        return ""

    def _try(self, text: str, seconds: float) -> str:
        beginning = LLMatcher(self._tokenizer, text, limits=LIMITS, log_level=0)
        if beginning.is_error():
            return ""  # a part that is no grammar by itself
        until = time.thread_time() + seconds  # to compile it may have taken as long
        for number in range(_TEXTS):
            matcher, rng = beginning.deep_copy(), random.Random(number)
            for _ in range(_BYTES):
                began = time.thread_time()
                if began > until or matcher.is_stopped():
                    break
                bits = matcher.compute_bitmask()
                if matcher.is_error():
                    return "it becomes too complex"
                matcher.consume_token(_choose(bits, number, rng))
                if time.thread_time() - began > MOST_SECONDS_EACH:
                    return f"it takes more than {1000 * MOST_SECONDS_EACH:g} ms behind a single character"
        return ""


class _Bytes:
    """A vocabulary of all bytes, and of special tokens with their ids."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.is_tokenizer_wrapper = True
        special = set(tokens.values())
        size = max([512, *(id + 2 for id in special)])
        self.tokens = [b""] * size
        free = (id for id in range(size) if id not in special)
        for byte in range(256):
            self.tokens[next(free)] = bytes([byte])
        for name, id in tokens.items():
            self.tokens[id] = name.encode()
        self.eos_token_id, self.bos_token_id = next(free), None
        self.tokens[self.eos_token_id] = b"</s>"
        self.special_token_ids = sorted({*special, self.eos_token_id})
        self._ids = {data: id for id, data in enumerate(self.tokens) if len(data) == 1}

    def __call__(self, text: str) -> list[int]:
        return [self._ids[bytes([byte])] for byte in text.encode()]


def _choose(bits: bytes, number: int, rng: random.Random) -> int:
    """A token that is allowed: the first texts nest as deep as they may, or repeat what they can."""
    allowed = int.from_bytes(bits, "little")
    ids = [id for id in range(allowed.bit_length()) if allowed >> id & 1]
    if number == 0:
        return next((id for id in ids if id < 256 and id in _OPENERS), ids[-1] if ids else 0)
    if number == 1:
        return next((id for id in ids if 32 < id < 127), ids[0] if ids else 0)
    return rng.choice(ids) if ids else 0


def _parts(grammar: AnswerGrammar) -> Iterator[str]:
    """The parts that could take long, the most suspicious first, each as a grammar in llguidance's form."""
    match grammar.kind:
        case "json":
            for schema in _schema_parts(json.loads(grammar.text)):
                yield llguidance_grammar("json", json.dumps(schema))
        case "lark":
            for text in _lark_parts(grammar.text):
                yield llguidance_grammar("lark", text)
        case "llguidance":
            yield from _several(json.loads(grammar.text)["grammars"])
        case "regex":
            pass


def _several(grammars: list[dict[str, Any]]) -> Iterator[str]:
    for number, each in enumerate(grammars):
        others = [other for at, other in enumerate(grammars) if at not in (0, number)]
        if isinstance(text := each.get("lark_grammar"), str):
            for part in _lark_parts(text):
                yield json.dumps({"grammars": [{"name": "start", "lark_grammar": part}, *others]})
        elif isinstance(schema := each.get("json_schema"), dict):
            for found in [schema, *_schema_parts(schema)]:
                yield json.dumps({"grammars": [{"name": "start", "json_schema": found}, *others]})


def _lark_parts(text: str) -> Iterator[str]:
    """The grammar from each of its rules on."""
    found = list(_RULE.finditer(text))
    ends = [*(each.start() for each in found[1:]), len(text)]
    rules = {each[1]: text[each.end() : end] for each, end in zip(found, ends, strict=True)}
    for name in sorted(rules, key=lambda name: -rules[name].count("|"))[:_MOST_PARTS]:
        if name != "start":
            yield f"{_START.sub('start_', text)}\nstart: {name}\n"
        body = rules[name].strip()
        if body.startswith("%json"):
            try:
                schema = json.loads(body.removeprefix("%json"))
            except ValueError:
                continue  # it is not alone in its rule
            for part in _schema_parts(schema):
                yield f"start: %json {json.dumps(part)}\n"


def _schema_parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas that it defines, and those of many alternatives, with all that they refer to."""
    shared = {name: schema[name] for name in ("$defs", "definitions", "x-guidance") if name in schema}
    found: list[tuple[int, dict[str, Any]]] = []
    waiting: list[tuple[str, object]] = [("", schema)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            choices = max(_count(value.get("anyOf")), _count(value.get("oneOf")))
            if value is not schema and (choices >= _MANY or key in ("$defs", "definitions")):
                found.append((choices, value))
            inside = key not in ("$defs", "definitions") and ("$defs" in value or "definitions" in value)
            waiting += [(name if inside or value is schema else key, each) for name, each in value.items()]
        elif isinstance(value, list):
            waiting += [("", each) for each in value]
    for _, part in sorted(found, key=lambda each: -each[0])[:_MOST_PARTS]:
        yield {**part, **shared}


def _count(value: object) -> int:
    return len(value) if isinstance(value, list) else 0
