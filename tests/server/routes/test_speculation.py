"""What a request says of guesses, and what its answer tells of them."""

from typing import Any

import httpx
import pytest
from fake_api import events, make_app, make_client
from fake_frontend import FakeFrontend

from engine_core.engine_stats import GuessReport
from server.options.server_flags import GuessReportLevel, ReportOptions

TALK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
TEXT = {"prompt": "hi", "max_tokens": 20}
ROUTES = pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", TEXT),
        ("/v1/chat/completions", TALK),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"model": "tiny", **TALK}),
    ],
)
ANSWERS = pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", TEXT), ("/v1/chat/completions", TALK)]
)


@ROUTES
async def test_every_api_takes_a_bound(
    frontend: FakeFrontend, client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    for given in (0, 3, None):
        answer = await client.post(path, json={**body, "speculative_tokens": given})
        assert answer.status_code == 200, answer.text
        assert frontend.asked[-1][1].speculative_tokens == given
    answer = await client.post(path, json={**body, "speculative_tokens": -1})
    assert answer.status_code == 400
    assert "speculative_tokens must be at least 0, got -1" in answer.text


def reporting(frontend: FakeFrontend, level: GuessReportLevel) -> httpx.AsyncClient:
    frontend.guesses = GuessReport([3, 2], [3, 0])
    return make_client(make_app(frontend, reports=ReportOptions(per_request_spec_decode_metrics=level)))


@ANSWERS
@pytest.mark.parametrize("level", ["none", "summary", "detailed"])
async def test_answers_tell_what_became_of_guesses_if_the_operator_wants_it(
    frontend: FakeFrontend, level: GuessReportLevel, path: str, body: dict[str, Any]
) -> None:
    async with reporting(frontend, level) as client:
        whole = (await client.post(path, json=body)).json()
        streamed = events((await client.post(path, json={**body, "stream": True})).text)
        both = (await client.post(path, json={**body, "n": 2})).json()
    assert "metrics" not in both, "of several answers nothing is told"
    if level == "none":
        assert "metrics" not in whole and not any("metrics" in each for each in streamed)
        return
    told = whole["metrics"]["speculative_decoding"]
    assert (told["num_spec_steps"], told["num_accepted_draft_tokens"]) == (2, 3)
    assert told.get("per_step_drafted") == ([3, 2] if level == "detailed" else None)
    assert [each["metrics"] for each in streamed if "metrics" in each] == [whole["metrics"]]
