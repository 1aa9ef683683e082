"""Requests to POST /v1/completions that are refused, and prompts and answers cut to the model's length."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fake_api import post, refusal
from fake_frontend import FakeFrontend

PATH = "/v1/completions"


@pytest.mark.parametrize("name", ["", "../../x", "a b", "x" * 129, "a\r\nb"])
async def test_a_request_id_of_other_characters_is_refused(client: httpx.AsyncClient, name: str) -> None:
    assert (await refusal(client, PATH, prompt="hi", request_id=name))["param"] == "request_id"


async def test_an_unknown_model(client: httpx.AsyncClient) -> None:
    error = await refusal(client, PATH, status=404, model="x", prompt="hi")
    assert (error["type"], error["param"]) == ("NotFoundError", "model")
    assert error["message"].startswith("The model `x` does not exist.")


@pytest.mark.parametrize("name", [None, ""])
async def test_no_model_is_the_served_one(client: httpx.AsyncClient, name: str | None) -> None:
    assert (await post(client, PATH, model=name, prompt="hi"))["model"] == "org/tiny"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3}, "temperature must be in [0, 2], got 3.0. (parameter=temperature, value=3.0)"),
        (
            {"prompt": "x" * 128},
            "This model's maximum context length is 128 tokens. However, your prompt contains 129",
        ),
        ({"prompt": "x" * 127}, "The decoder prompt (length 128) plus the number of requested output tokens"),
        ({"prompt": "x" * 3_000_000}, "This model's maximum context length is 128 tokens."),
        ({"prompt": "", "add_special_tokens": False}, "The decoder prompt cannot be empty"),
        ({"prompt": [-1]}, "token_id(s) [-1] in prompt contain out-of-vocab token ids. Vocabulary size: 258"),
        (
            {"prompt": [1, 258]},
            "token_id(s) [258] in prompt contain out-of-vocab token ids. Vocabulary size: 258",
        ),
        (
            {"truncate_prompt_tokens": 129},
            "truncate_prompt_tokens=129 cannot be greater than max_model_len = 128.",
        ),
        ({"truncate_prompt_tokens": 0}, "The decoder prompt cannot be empty"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_refused(
    client: httpx.AsyncClient, fields: dict[str, Any], message: str, streamed: bool
) -> None:
    error = await refusal(client, PATH, **{"prompt": "hi", **fields, "stream": streamed})
    assert message in error["message"]
    assert error["type"] == "BadRequestError"


async def test_max_tokens_is_clamped_to_the_window(client: httpx.AsyncClient) -> None:
    answer = await post(client, PATH, prompt="x" * 122, max_tokens=128)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 128


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, b"XYZ"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, b"XYZ"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, b"abc"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 100}, b"." * 25 + b"XYZ"),
        ({"truncate_prompt_tokens": -1, "max_tokens": None}, b"." * 109 + b"XYZ"),
    ],
)
async def test_truncation(
    frontend: FakeFrontend, client: httpx.AsyncClient, fields: dict[str, Any], kept: bytes
) -> None:
    prompt = "abc" + "." * 300_000 + "XYZ"
    answer = await post(client, PATH, prompt=prompt, add_special_tokens=False, echo=True, **fields)
    assert frontend.asked[0][0] == [*kept]
    assert answer["usage"]["prompt_tokens"] == len(kept)
    assert answer["choices"][0]["text"].startswith(kept.decode())
