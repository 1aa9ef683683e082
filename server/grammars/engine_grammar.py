"""Grammars, and how tokens are spelled, as the engine is told of them."""

from __future__ import annotations

from collections.abc import Iterable

from engine_core.protocol import Grammar, Spelling
from server.grammars.building import Built
from server.model_facts import Facts
from server.text.tokenizer import Tokenizer


def as_grammar(built: Built) -> Grammar:
    """What the engine is told."""
    return Grammar(built.kind, built.text, built.wakes, built.again)


def spelling_of(tokenizer: Tokenizer, facts: Facts, marks: Iterable[int] = ()) -> Spelling:
    """How the tokens of a model are spelled. `marks` are no text either, whatever the tokenizer says."""
    return Spelling(
        tokens=[tokenizer.token_bytes(id) for id in range(tokenizer.largest_id + 1)],
        special=sorted({*tokenizer.special_ids, *marks}),
        ends=list(facts.eos_token_ids),
        tokenizer=tokenizer.path,
    )
