"""How questions are worded, and how probabilities come from log-probabilities of tokens."""

import json
import math
from itertools import permutations
from pathlib import Path

import pytest

from server.requests.decisions import (
    MOST_BRANCHES,
    Branch,
    Kind,
    Labels,
    Option,
    Question,
    averaged,
    choice_confidence,
    expectation,
    forms,
    predicate,
    probabilities,
    read_temperatures,
    score_confidence,
    tempered,
    wordings,
)

ENDS = (90, 91)


def question(kind: Kind, *values: str | bool) -> Question:
    return Question(kind, "q", "Which?", [Option(value, f"about {value}") for value in values])


def test_a_predicate_is_asked_once_and_describes_what_is_described() -> None:
    [worded] = wordings(predicate("q", "It rains.", no="The sun shines."))
    assert worded.labels == ["Yes", "No"]
    assert (
        "It rains." in worded.text and "\nNo: The sun shines." in worded.text and "\nYes:" not in worded.text
    )


def test_a_choice_is_shown_in_an_order_and_from_behind_whatever_order_is_given() -> None:
    first, second = wordings(question("choice", "pear", "apple", "fig"))
    assert (first.labels, second.labels) == (["C", "A", "B"], ["A", "C", "B"])
    assert "\nA. apple: about apple\nB. fig" in first.text and "\nA. pear: about pear\nB. fig" in second.text
    texts = {
        tuple(each.text for each in wordings(question("choice", *order)))
        for order in permutations(("pear", "apple", "fig", True, "true"))
    }
    assert len(texts) == 1


def test_one_order_is_the_given_one_and_levels_have_no_other() -> None:
    [worded] = wordings(question("choice", "b", "a"), 1)
    assert worded.labels == ["A", "B"] and "\nA. b: about b\nB. a" in worded.text
    [worded] = wordings(question("score", "low", "high"))
    assert worded.labels == ["A", "B"]


def test_of_more_options_than_letters_their_own_texts_are_the_labels() -> None:
    many = question("choice", *(f"queue {number}" for number in range(27)))
    assert forms(many) == ("described", "named", "unlisted") and forms(question("choice", "a", "b")) == (
        "described",
    )
    first, second = wordings(many)
    assert first.labels == second.labels == [option.text for option in many.options]
    assert "\nqueue 3: about queue 3" in first.text
    named = wordings(many, 2, "named")[0].text
    assert "\nqueue 3\n" in named and "about queue" not in named
    [unlisted] = wordings(many, 2, "unlisted")
    assert "queue 3" not in unlisted.text


def test_labels_of_one_token_are_told_apart_at_one_place() -> None:
    labels = Labels([[3], [1], [2]], ENDS)
    assert labels.branches == [Branch((), (1, 2, 3))]
    assert labels.likelihoods([[-1.0, -2.0, -3.0]]) == [-3.0, -1.0, -2.0]


def test_labels_that_begin_alike_are_told_apart_behind_what_they_share() -> None:
    labels = Labels([[7, 1, 5], [7, 2, 5], [7, 2, 6, 8]], ENDS)
    assert labels.branches == [Branch((7,), (1, 2)), Branch((7, 2), (5, 6))]
    assert labels.likelihoods([[-1.0, -2.0], [-0.5, -0.25]]) == [-1.0, -2.5, -2.25]


def test_a_label_with_which_another_begins_is_followed_by_the_end() -> None:
    labels = Labels([[1], [1, 2]], ENDS)
    assert labels.branches == [Branch((1,), (2, *ENDS))]
    short, long = labels.likelihoods([[-1.0, -2.0, -3.0]])
    assert (short, long) == (pytest.approx(math.log(math.exp(-2) + math.exp(-3))), -1.0)


def test_a_token_that_some_of_the_labels_share_counts_for_these() -> None:
    labels = Labels([[1], [2, 3, 4], [2, 3, 5]], ENDS)
    assert labels.branches == [Branch((), (1, 2)), Branch((2,), (3,)), Branch((2, 3), (4, 5))]
    assert labels.likelihoods([[-1.0, -2.0], [-4.0], [-8.0, -16.0]]) == [-1.0, -14.0, -22.0]


def test_equal_labels_are_equally_likely() -> None:
    labels = Labels([[1, 2], [1, 2]], ENDS)
    assert labels.branches == [] and labels.likelihoods([]) == [0.0, 0.0]


def test_probabilities_are_normalised_and_a_temperature_makes_them_alike() -> None:
    assert probabilities([math.log(0.2), math.log(0.6)]) == pytest.approx([0.25, 0.75])
    assert probabilities([0.0, -1000.0]) == [1.0, 0.0]
    assert tempered([0.1, 0.9], 2.0) == pytest.approx([0.25, 0.75]) and tempered([0.25, 0.75], 0.5) == (
        pytest.approx([0.1, 0.9])
    )
    assert tempered([0.0, 1.0], 2.0) == [0.0, 1.0]
    assert averaged([[0.2, 0.8], [0.4, 0.6]]) == pytest.approx([0.3, 0.7])


def test_confidences_and_the_mean_level() -> None:
    assert choice_confidence([0.7, 0.2, 0.1]) == pytest.approx(0.55) and choice_confidence([0.5, 0.5]) == 0
    assert score_confidence([0, 1, 0]) == 1 and score_confidence([0.5, 0, 0.5]) == 0
    assert score_confidence([0.1, 0.8, 0.1]) == pytest.approx(0.7)
    assert expectation([0.2, 0.3, 0.5]) == pytest.approx(1.3)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ('{"temperatures": {"choice": 0}}', "`float` > 0"),
        ('{"temperatures": {"mood": 1}}', "Invalid enum value"),
    ],
)
def test_a_calibration_that_cannot_be_used(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "calibration.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=said):
        read_temperatures(file)


def test_a_calibration(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({"temperatures": {"score": 1.5}, "fitted_on": 12}))
    assert read_temperatures(file) == {"score": 1.5}


def test_labels_that_begin_alike_for_long_are_told_apart_at_once() -> None:
    common = range(100_000)
    assert Labels([[*common, 1], [*common, 2]], ENDS).branches == [Branch((*common,), (1, 2))]


def test_no_more_branches_are_looked_for_than_may_be() -> None:
    long = [3] * 100_000
    assert len(Labels([[1], [*long, 1], [*long, 2]], ENDS).branches) == MOST_BRANCHES + 1
