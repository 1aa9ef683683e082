"""Holds the answers of an engine in this process to the form that is asked of them."""

from __future__ import annotations

import logging

import msgspec

from engine_core.engine import Engine
from engine_core.protocol import Grammar
from server.grammars import as_grammar, spelling_of
from server.requests.facts import Facts
from server.structured.building import build
from server.structured.params import Asked
from server.text.tokenizer import Tokenizer

_MOST_KEPT = 1024

_log = logging.getLogger(__name__)


class Forms:
    """The grammars of what was asked. The program is its own client, so no other process proves them."""

    def __init__(self, engine: Engine, facts: Facts, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._facts = facts
        self._tokenizer = tokenizer
        self._known: dict[bytes, Grammar] = {}

    def grammar(self, asked: Asked) -> Grammar:
        """Raises BadRequest if there is none, and logs what of it is not enforced."""
        key = msgspec.msgpack.encode(asked)
        if (known := self._known.get(key)) is not None:
            return known
        special = {
            name: id for name, id in self._tokenizer.added_tokens.items() if id in self._tokenizer.special_ids
        }
        built = build(asked, special)
        if built.ignored:
            _log.warning("%s: not enforced: %s", asked.field, ", ".join(built.ignored))
        self._engine.spell(spelling_of(self._tokenizer, self._facts))
        if len(self._known) >= _MOST_KEPT:
            self._known.clear()
        return self._known.setdefault(key, as_grammar(built))
