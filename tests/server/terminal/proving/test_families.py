"""Each family of text models answers as it did when its answers were stored."""

import family_answers
import pytest

from server.terminal.proving.checks import check_answers, check_layers

STORED = family_answers.stored()


def test_all_families_are_stored() -> None:
    assert set(STORED) == set(family_answers.FAMILIES), "run tests/support/family_answers.py"


@pytest.mark.turns(7)
@pytest.mark.parametrize("family", STORED)
def test_a_family_answers_as_it_did(family: str) -> None:
    proof, facts = family_answers.proof_of(family), STORED[family]
    assert proof.weights[:16] == facts.made_with, "the checkpoint is another one: store its answers anew"
    checks = [check(family, facts, proof.computed) for check in (check_layers, check_answers)]
    assert not [check.found for check in checks if not check.is_right]
