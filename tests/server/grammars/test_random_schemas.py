"""Answers drawn by chance from the grammars of schemas drawn by chance: each is what its schema describes."""

import json
import random

import jsonschema
import pytest
from grammar_walks import Vocabulary, walk
from schemas import random_leaf, random_schema

from server.grammars.response_format import AskedForm, StructuredOutputsParams, build_grammar

VOCABULARY = Vocabulary()
PARTS = 12


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_random_answers_of_random_schemas_are_valid(part: int) -> None:
    """All parts have 1,200 schemas, with up to four answers each; most of these end."""
    ended = 0
    for number in range(part, 1200, PARTS):
        rng = random.Random(number)
        schema = random_leaf(rng) if rng.random() < 0.3 else random_schema(rng)
        built = build_grammar(AskedForm(StructuredOutputsParams(json=schema), "schema", strict=True), {})
        grammar = json.dumps({"grammars": [{"json_schema": json.loads(built.text)}]})
        for _ in range(4):
            if (written := walk(VOCABULARY, grammar, rng, most=400)) is not None:
                answer = json.loads(VOCABULARY.text(written, {}))
                jsonschema.Draft202012Validator(schema).validate(answer)
                ended += 1
    assert ended > 200
