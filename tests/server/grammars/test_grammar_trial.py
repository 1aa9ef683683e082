from __future__ import annotations

from functools import cache

import pytest
from grammar_bombs import STRUCTURED
from real_schemas import real_schemas

from server.grammars.grammar_trial import Trial
from server.grammars.response_format import AnswerGrammar, AskedForm, StructuredOutputsParams, build_grammar

SLOW = ("Lark, at second", "Lark, later", "EBNF", "regex, nested", "tag, regex")
"""The names of bombs that take so little that this process can try them."""


@cache
def trial() -> Trial:
    return Trial({"<call>": 300})


def grammar(**params: object) -> AnswerGrammar:
    return build_grammar(AskedForm(StructuredOutputsParams(**params), "form"), {"<call>": 300})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", SLOW)
def test_what_takes_long_is_found(name: str) -> None:
    assert trial().finds(grammar(**STRUCTURED[name]))


@pytest.mark.parametrize(
    "params",
    [
        {"regex": "[a-z]+@[a-z]+\\.com"},
        {"grammar": 'start: e\ne: e "+" t | t\nt: t "*" f | f\nf: "(" e ")" | /[0-9]+/'},
        {"choice": ["yes", "no"]},
        {"structural_tag": {"format": {"type": "token", "token": "<call>"}}},
    ],
)
def test_what_is_usual_is_not(params: dict[str, object]) -> None:
    assert trial().finds(grammar(**params)) == ""


@pytest.mark.turns(3)
def test_no_real_schema_is_refused() -> None:
    refused = {name: trial().finds(grammar(json=schema)) for name, schema in real_schemas().items()}
    assert len(refused) > 80 and not any(refused.values())
