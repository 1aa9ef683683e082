"""Decisions of the demo model as the clients of both APIs ask for them, and as TypeSafe's are specified."""

from collections.abc import Set
from typing import Any

import openai
import pytest
from live import LiveServer, serving

pytestmark = pytest.mark.turns(4)

OPTIONAL = {"auth.bearer", "auth.missing", "auth.invalid", "auth.ignored-when-off"}
"""Requirements of which some are for servers with keys, and the others for those without."""


def check(url: str, key: str | None, only: Set[str] | None = None) -> Set[str]:
    """Runs the suite jevcompat, and returns the requirements that were tested, all of which are met."""
    runner: Any = pytest.importorskip("jevcompat.runner")
    report = runner.run(url, key=key, only=only)
    failed = [f"{one.id}: {one.findings}" for one in report.results if one.status == "fail"]
    assert not failed and not report.aborted and not report.case_errors
    return {one.id for one in report.results if one.status == "pass"}


def test_system_one_is_as_specified(demo: LiveServer) -> None:
    runner: Any = pytest.importorskip("jevcompat.spec")
    met = check(demo.url, None)
    assert met >= runner.REQUIREMENTS.keys() - OPTIONAL and "auth.ignored-when-off" in met


def test_system_one_takes_keys_as_specified() -> None:
    pytest.importorskip("jevcompat")
    with serving("demo", "--api-key", "secret", "--dtype", "float32") as server:
        met = check(server.url, "secret", {"auth", "sdk-python", "choice-basic", "score-levels"})
    assert met >= {"auth.bearer", "auth.missing", "auth.invalid", "dropin.sdk-python"}


def test_openais_client_reads_decisions(client: openai.OpenAI) -> None:
    asked: Any = [
        {"type": "predicate", "name": "refund", "instructions": "The customer asks for money back."},
        {
            "type": "choice",
            "instructions": "Which team?",
            "choices": [{"value": "billing"}, {"value": False}],
        },
        {"type": "score", "instructions": "How angry?", "levels": [{"label": "calm"}, {"label": "furious"}]},
    ]
    decisions: Any = getattr(client, "decisions", None)
    if decisions is None:
        pytest.skip("this version of openai has no decisions")
    said = [{"role": "user", "content": "Please refund me."}, {"role": "assistant", "content": "Why?"}]
    decision = decisions.create(
        model="demo",
        input=said,
        questions=asked,
        prompt_cache_key="a",
        prompt_cache_options={"mode": "implicit"},
    )
    refund, team, anger = decision.answers
    assert refund.name == "refund" and 0 < refund.probability < 1
    assert team.choice in ("billing", False) and sum(each.probability for each in team.probabilities) == 1
    assert 0 < anger.score < 1 and anger.probabilities[1].label == "furious"
    assert decision.usage.input_tokens > 50 and decision.usage.output_tokens == 0
    with pytest.raises(openai.BadRequestError, match=r"questions\[1\]"):
        decisions.create(
            model="demo", input="x", questions=[asked[0], {"type": "choice", "instructions": "?"}]
        )
