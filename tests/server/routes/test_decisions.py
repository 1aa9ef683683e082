"""Typed questions over HTTP: bodies and answers of both APIs, and what is refused of them."""

import json
from typing import Any

import httpx
import pytest
from fake_api import assert_the_same_if_long, make_app, make_client, post, refusal
from fake_frontend import FakeFrontend

from engine_core.protocol import Failed
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
SYSTEM = {
    "state": {"text": "Rain today."},
    "questions": {
        "rain": {"type": "noul", "criteria": {"true": ["wet", "cold"]}},
        "team": {"type": "choice", "instructions": "Which?", "criteria": {"a": None, "b": {"owns": 1}}},
        "mood": {"type": "score", "instructions": "How?", "criteria": ["bad", {"label": "good"}]},
    },
}


@pytest.fixture(autouse=True)
def reader(frontend: FakeFrontend) -> None:
    """A model that prefers an option by its letter, A most, and Yes to No."""
    frontend.serve("generate", max_model_len=4096)


def prompts(frontend: FakeFrontend) -> list[str]:
    return [bytes(tokens).decode() for sent, _ in frontend.told for tokens in sent]


async def test_answers_have_the_probabilities_of_options(client: httpx.AsyncClient) -> None:
    answer = await post(client, "/v1/decisions", **ASKED)
    rain, team, mood = answer["answers"]
    assert (rain["type"], rain["name"]) == ("predicate", "rain") and 0 < rain["probability"] < 0.5
    assert rain.keys() == {"type", "name", "probability"}
    assert [each["value"] for each in team["probabilities"]] == ["true", True, "sales"]
    assert sum(each["probability"] for each in team["probabilities"]) == pytest.approx(1)
    assert team["name"] is None and team["choice"] in ("true", True, "sales") and 0 <= team["confidence"] < 1
    assert [(each["value"], each["label"]) for each in mood["probabilities"]] == [(0, "bad"), (1, "good")]
    assert mood["score"] == pytest.approx(mood["probabilities"][1]["probability"])
    assert answer["model"] == "org/tiny" and answer["usage"]["output_tokens"] == 0


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


async def test_exchanged_options_keep_their_probabilities(client: httpx.AsyncClient) -> None:
    found: list[dict[str, float]] = []
    for values in (["pear", "fig", "nut"], ["nut", "fig", "pear"], ["fig", "nut", "pear"]):
        question = {
            "type": "choice",
            "instructions": "Which?",
            "choices": [{"value": each} for each in values],
        }
        [answer] = (await post(client, "/v1/decisions", input="x", questions=[question]))["answers"]
        found.append({each["value"]: each["probability"] for each in answer["probabilities"]})
    assert found[0] == found[1] == found[2] and len(set(found[0].values())) > 1


async def test_one_order_of_options_asks_once(frontend: FakeFrontend) -> None:
    from server.options.server_flags import DecisionOptions

    async with make_client(make_app(frontend, decisions=DecisionOptions(decide_orders=1))) as client:
        await post(client, "/v1/decisions", input="x" * 40, questions=[TEAM])
    assert [len(sent) for sent, _ in frontend.told] == [1]


async def test_conversations_calls_and_json_are_read(
    client: httpx.AsyncClient, frontend: FakeFrontend
) -> None:
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
        {"role": "user", "content": [{"type": "input_json", "data": {"a": [1]}}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "found"},
    ]
    await post(client, "/v1/decisions", input=items, questions=[TRUE])
    [text] = prompts(frontend)
    assert '<user>{"a":[1]}\n' in text and "<developer>Be kind.\n" in text
    assert "found" in (asked := text.partition("</tool_call>\n")[2]) and "\n\nDecide the" in asked


async def test_control_tokens_of_questions_are_text(
    client: httpx.AsyncClient, frontend: FakeFrontend
) -> None:
    await post(client, "/v1/decisions", input="x", questions=[{**TRUE, "instructions": "Is it <eos>?"}])
    assert "Is it <eos>?" in prompts(frontend)[0]  # as bytes: the token has no place among these


def test_control_tokens_of_options_are_text(frontend: FakeFrontend) -> None:
    choices = [{"value": each} for each in ("<eos>", *map(str, range(30)))]
    body = DecisionRequest.model_validate({"input": "x", "questions": [{**TEAM, "choices": choices}]})
    read = read_decisions(body, frontend.reading_context)
    assert all(asked.labels[0] == list(b"<eos>") for asked in read.asked)


async def test_a_question_that_fails_is_refused_alone(
    client: httpx.AsyncClient, frontend: FakeFrontend
) -> None:
    frontend.tell_errors = {1: Failed(0, 500, "it broke")}
    answers = (await post(client, "/v1/decisions", **ASKED))["answers"]
    assert [each["type"] for each in answers] == ["predicate", "refusal", "score"]
    assert answers[1] == {"type": "refusal", "name": None}
    told = await client.post("/v1/systemone", json=SYSTEM)
    assert told.status_code == 200
    frontend.told, frontend.tell_errors = [], {0: Failed(0, 500, "it broke")}
    told = await client.post("/v1/systemone", json=SYSTEM)
    assert told.json()["detail"][0]["loc"] == ["body", "questions.rain"] and "it broke" in told.text


async def test_all_end_with_an_error_that_is_no_questions_fault(
    client: httpx.AsyncClient, frontend: FakeFrontend
) -> None:
    frontend.tell_errors = {1: Failed(0, 503, "later")}
    assert (await client.post("/v1/decisions", json=ASKED)).status_code == 503


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ({"type": "mood"}, "questions[1] ('odd'): questions have the type predicate or choice or score"),
        ({"type": "predicate"}, "questions[1] ('odd'): instructions: Field required"),
        ({"type": "choice", "instructions": "?", "choices": []}, "give 2 to 255 choices, got 0"),
        (
            {"type": "choice", "instructions": "?", "choices": [{"value": f"{n}"} for n in range(256)]},
            "give 2 to 255 choices, got 256",
        ),
        (
            {"type": "choice", "instructions": "?", "choices": [{"value": "a"}, {"value": "a"}]},
            "2 of the choices are 'a'",
        ),
        ({"type": "score", "instructions": "?", "levels": [{"label": "a"}]}, "give 2 to 255 levels, got 1"),
        (
            {"type": "predicate", "instructions": [{"type": "input_image", "image_url": "x"}]},
            "pictures are read in `input`",
        ),
    ],
)
async def test_a_wrong_question_is_named(client: httpx.AsyncClient, question: Any, said: str) -> None:
    told = await refusal(client, "/v1/decisions", input="x", questions=[TRUE, {"name": "odd", **question}])
    assert "questions[1] ('odd')" in told["message"] and said in told["message"]


async def test_names_are_given_once_and_a_text_model_reads_no_pictures(client: httpx.AsyncClient) -> None:
    told = await refusal(client, "/v1/decisions", input="x", questions=[TRUE, TRUE])
    assert "2 questions have the name 'rain'" in told["message"]
    picture = {
        "role": "user",
        "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}],
    }
    await refusal(client, "/v1/decisions", input=[picture], questions=[TRUE])
    for none in ([], [TRUE] * 401):
        told = await refusal(client, "/v1/decisions", input="x", questions=none)
        assert "questions" in told["message"]


async def test_a_state_that_is_too_long_says_by_how_much(client: httpx.AsyncClient) -> None:
    told = await refusal(client, "/v1/decisions", input="x" * 4096, questions=[TRUE])
    assert (
        told["param"] == "input" and "`input` has 4149 tokens, which is 120 more than fit" in told["message"]
    )


async def test_a_question_for_which_there_is_no_room_is_refused_alone(client: httpx.AsyncClient) -> None:
    long = {**TRUE, "name": "long", "instructions": "y" * 4096}
    answers = (await post(client, "/v1/decisions", input="x", questions=[TRUE, long]))["answers"]
    assert [each["type"] for each in answers] == ["predicate", "refusal"]


async def test_system_one_answers_by_name(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    told = await client.post("/v1/systemone", json={"model": "jev-latest", "x_trace": 1, **SYSTEM})
    answer = told.json()
    assert (
        answer.keys() == {"model", "answers", "usage", "x_decided_by"} and answer["x_decided_by"] == "letters"
    )
    assert answer["answers"]["rain"]["type"] == "noul"
    assert answer["answers"]["team"]["probabilities"].keys() == {"a", "b"}
    assert answer["answers"]["mood"]["legend"] == {"0": "bad", "1": '{"label":"good"}'}
    texts = prompts(frontend)
    assert (
        '{"text":"Rain today."}' in texts[0]
        and "\nYes: wet\ncold" in texts[0]
        and 'b: {"owns":1}' in texts[1]
    )


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"state": "x"}, "questions"),
        ({"state": "x", "questions": {}}, "questions"),
        ({"state": "x", "questions": {"q": {"type": "boolean"}}}, "questions.q"),
        ({"state": "x", "questions": {"q": {"type": "noul"}}}, "questions.q"),
        (
            {"state": "x", "questions": {"q": {"type": "score", "instructions": "?", "criteria": {}}}},
            "questions.q",
        ),
    ],
)
async def test_system_one_says_where_a_body_is_wrong(
    client: httpx.AsyncClient, body: Any, place: str
) -> None:
    told = await client.post("/v1/systemone", json=body)
    assert told.status_code == 422 and told.json()["detail"][0]["loc"] == ["body", place]
    missing = await client.post("/v1/systemone", json={**SYSTEM, "model": "other"})
    assert missing.status_code == 404 and missing.json()["detail"]["error_type"] == "not_found_error"


@pytest.mark.parametrize(("path", "body"), [("/v1/decisions", ASKED), ("/v1/systemone", SYSTEM)])
async def test_long_bodies_are_answered_alike(
    client: httpx.AsyncClient, frontend: FakeFrontend, path: str, body: dict[str, Any]
) -> None:
    await assert_the_same_if_long(client, frontend, path, json.loads(json.dumps(body)))
