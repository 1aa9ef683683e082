"""Reports on the guesses for an answer, under vLLM's names."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from engine_core.engine_stats import GuessReport
from server.options.server_flags import GuessReportLevel


class SpeculationReport(msgspec.Struct, kw_only=True):
    """Counts of the guesses for one answer that held; steps without guesses are not counted."""

    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    draft_acceptance_rate: float
    mean_acceptance_length: float
    """The tokens that a step with guesses gave, the one behind the guesses counted."""
    acceptance_histogram: list[int]
    """The number of steps in which no guess held, one held, and so on."""
    per_step_drafted: list[int] | UnsetType = UNSET
    per_step_accepted: list[int] | UnsetType = UNSET


class AnswerMetrics(msgspec.Struct):
    speculative_decoding: SpeculationReport


def report_guesses(report: GuessReport, level: GuessReportLevel) -> AnswerMetrics:
    steps, guessed, held = len(report.guessed), sum(report.guessed), sum(report.held)
    counts = [0] * (max(report.guessed, default=0) + 1)
    for count in report.held:
        counts[count] += 1
    told = SpeculationReport(
        num_spec_steps=steps,
        num_draft_tokens=guessed,
        num_accepted_draft_tokens=held,
        draft_acceptance_rate=held / max(guessed, 1),
        mean_acceptance_length=1 + held / max(steps, 1),
        acceptance_histogram=counts,
    )
    if level == "detailed":
        told.per_step_drafted, told.per_step_accepted = report.guessed, report.held
    return AnswerMetrics(told)
