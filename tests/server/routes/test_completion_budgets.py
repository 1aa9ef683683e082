"""Budgets of reasoning behind prompts of text: what the engine is asked, and the client is told."""

from typing import Any

import httpx
import pytest
from fake_api import make_app, make_client, post
from fake_frontend import FakeFrontend
from fake_vocabularies import with_tokens

from engine_core.protocol import Thinking
from server.output_parsing.format_detection import find_format

PATH = "/v1/completions"


def serving(frontend: FakeFrontend, parser: str = "qwen3") -> httpx.AsyncClient:
    return make_client(make_app(frontend, tool_call_parser="none", reasoning_parser=parser))


def thinking(frontend: FakeFrontend) -> list[Any]:
    return [options.get("thinking") for _, _, options in frontend.asked]


@pytest.mark.parametrize("named", ["thinking_token_budget", "reasoning_budget"])
async def test_each_prompt_says_whether_it_has_opened_the_reasoning(
    frontend: FakeFrontend, named: str
) -> None:
    tokens = with_tokens(frontend, "<think>", "</think>")
    opens, closes = (tokens["<think>"],), (tokens["</think>"],)
    prompts = ["Why?<think>\nSo", "Why?", "<think>So</think>It is"]
    await post(serving(frontend), PATH, prompt=prompts, **{named: 5})
    assert thinking(frontend) == [
        Thinking(5, closes, open=is_open, opens=(opens,)) for is_open in (True, False, False)
    ]


async def test_a_prompt_of_ids_says_it_too(frontend: FakeFrontend) -> None:
    tokens = with_tokens(frontend, "<think>", "</think>")
    await post(serving(frontend), PATH, prompt=[5, 6, tokens["<think>"], 7], thinking_token_budget=0)
    [found] = thinking(frontend)
    assert found.open and found.budget == 0


async def test_no_bound_is_no_budget(frontend: FakeFrontend) -> None:
    with_tokens(frontend, "<think>", "</think>")
    await post(serving(frontend), PATH, prompt="hi", thinking_token_budget=-1)
    assert thinking(frontend) == [None]


@pytest.mark.parametrize(
    ("parser", "more", "told"),
    [
        ("none", {}, "not known how this model marks its reasoning"),
        ("qwen3", {"guided_choice": ["a", "b"]}, "from its first token on"),
    ],
)
async def test_a_budget_without_effect_is_told(
    frontend: FakeFrontend, parser: str, more: dict[str, Any], told: str
) -> None:
    with_tokens(frontend, "<think>", "</think>")
    body = {"prompt": "hi", "thinking_token_budget": 5, **more}
    response = await serving(frontend, parser).post(PATH, json=body)
    assert response.status_code == 200 and told in response.headers["warning"]
    assert thinking(frontend) == [None]


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<think>", True),
        ("<think>\n", True),
        ("<think>a</think>b<think>c", True),
        ("<think>a</think>", False),
        ("a", False),
        ("", False),
    ],
)
def test_the_last_marker_decides(frontend: FakeFrontend, prompt: str, is_open: bool) -> None:
    with_tokens(frontend, "<think>", "</think>")
    assert find_format(frontend.tokenizer, "none", "qwen3").leaves_thinking_open(prompt) == is_open
