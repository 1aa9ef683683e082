"""Typed questions over HTTP: in which order their prompts are computed, and of what they are made."""

import httpx
import pytest
from fake_api import post
from fake_frontend import FakeFrontend

from server.reading.decisions import read_decisions
from server.requests.decisions import INTRODUCTION
from server.schemas.decisions.openai_decisions import DecisionRequest

TRUE = {"type": "predicate", "name": "rain", "instructions": "It rains."}
TEAM = {
    "type": "choice",
    "instructions": [
        {"type": "input_text", "text": "Which team?"},
        {"type": "input_json", "data": {"since": 3}},
    ],
    "choices": [{"value": "true", "description": "the word"}, {"value": True}, {"value": "sales"}],
}
MOOD = {
    "type": "score",
    "name": "mood",
    "instructions": "How?",
    "levels": [{"label": "bad"}, {"label": "good"}],
}
ASKED = {"input": "Rain today.", "questions": [TRUE, TEAM, MOOD]}


@pytest.fixture(autouse=True)
def reader(frontend: FakeFrontend) -> None:
    """A model that prefers an option by its letter, A most, and Yes to No."""
    frontend.serve("generate", max_model_len=4096)


def prompts(frontend: FakeFrontend) -> list[str]:
    return [bytes(tokens).decode() for sent, _ in frontend.told for tokens in sent]


async def test_the_state_is_computed_first_and_all_prompts_begin_with_it(
    client: httpx.AsyncClient, frontend: FakeFrontend
) -> None:
    frontend.cached = 3
    answer = await post(client, "/v1/decisions", **ASKED)
    assert [len(sent) for sent, _ in frontend.told] == [1, 3]
    texts = prompts(frontend)
    begun = f"<user>Rain today.\n\n{INTRODUCTION}"
    assert all(text.startswith(begun) and text.endswith("\n<assistant>") for text in texts)
    assert 'Which team?\n{"since":3}' in texts[1] and "\nA. sales\nB. true\nC. true: the word\n" in texts[1]
    assert "\nA. true: the word\nB. true\nC. sales\n" in texts[2] and "\nA. bad\nB. good\n" in texts[3]
    tails = sum(len(text) - len(begun) for text in texts)
    assert answer["usage"]["input_tokens"] == len(begun) + tails
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 3
    groups = {options["group"] for _, options in frontend.told}
    assert len(groups) == 1


def test_control_tokens_of_options_are_text(frontend: FakeFrontend) -> None:
    choices = [{"value": each} for each in ("<eos>", *map(str, range(30)))]
    body = DecisionRequest.model_validate({"input": "x", "questions": [{**TEAM, "choices": choices}]})
    read = read_decisions(body, frontend.reading_context)
    assert all(asked.labels[0] == list(b"<eos>") for asked in read.asked)
