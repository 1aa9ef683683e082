"""How an answer tells what became of the guesses for it."""

import msgspec

from engine_core.engine_stats import GuessReport
from server.requests.speculation_reports import report_guesses


def test_a_report_has_sums_and_on_demand_each_step() -> None:
    report = GuessReport(guessed=[4, 2, 4, 1], held=[4, 0, 1, 1])
    told = msgspec.to_builtins(report_guesses(report, "summary"))["speculative_decoding"]
    assert told == {
        "num_spec_steps": 4,
        "num_draft_tokens": 11,
        "num_accepted_draft_tokens": 6,
        "draft_acceptance_rate": 6 / 11,
        "mean_acceptance_length": 2.5,
        "acceptance_histogram": [1, 2, 0, 0, 1],
    }
    more = msgspec.to_builtins(report_guesses(report, "detailed"))["speculative_decoding"]
    steps = {"per_step_drafted": [4, 2, 4, 1], "per_step_accepted": [4, 0, 1, 1]}
    assert more == {**told, **steps}


def test_an_answer_without_guesses_has_a_report_too() -> None:
    told = report_guesses(GuessReport([], []), "summary").speculative_decoding
    assert (told.num_spec_steps, told.draft_acceptance_rate, told.mean_acceptance_length) == (0, 0.0, 1.0)
    assert told.acceptance_histogram == [0]
