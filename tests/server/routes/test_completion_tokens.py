"""Tokens in the answers of POST /v1/completions: their ids, their log-probabilities, special tokens."""

from __future__ import annotations

import httpx
from fake_api import make_app, make_client, post, post_stream
from fake_frontend import BOS, EOS, FakeFrontend

PATH = "/v1/completions"


async def test_echo_with_logprobs(client: httpx.AsyncClient) -> None:
    answer = await post(client, PATH, prompt="hi", echo=True, logprobs=1, max_tokens=1)
    [choice] = answer["choices"]
    assert choice["text"] == "hiH"
    assert choice["logprobs"] == {
        "text_offset": [0, 0, 1, 2],
        "token_logprobs": [None, -0.5, -0.5, -0.5],
        "tokens": ["<bos>", "h", "i", "H"],
        "top_logprobs": [None, {"h": -0.5}, {"i": -0.5}, {"H": -0.5}],
    }


async def test_scoring_makes_nothing(client: httpx.AsyncClient) -> None:
    answer = await post(client, PATH, prompt="hi", echo=True, logprobs=0, max_tokens=0, return_token_ids=True)
    [choice] = answer["choices"]
    assert choice["text"] == "hi"
    assert choice["token_ids"] == [BOS, *b"hi"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs(client: httpx.AsyncClient) -> None:
    answer = await post(client, PATH, prompt="hi", prompt_logprobs=2, max_tokens=1)
    assert answer["choices"][0]["prompt_logprobs"] == [
        None,
        {
            "104": {"logprob": -0.5, "rank": 1, "decoded_token": "h"},
            "105": {"logprob": -1.5, "rank": 2, "decoded_token": "i"},
        },
        {
            "105": {"logprob": -0.5, "rank": 1, "decoded_token": "i"},
            "106": {"logprob": -1.5, "rank": 2, "decoded_token": "j"},
        },
    ]


async def test_token_ids(client: httpx.AsyncClient) -> None:
    body = {"prompt": "hi", "max_tokens": 4, "return_token_ids": True}
    [choice] = (await post(client, PATH, **body))["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([BOS, *b"hi"], [*b"Hell"])
    first, second = [chunk["choices"][0] for chunk in await post_stream(client, PATH, **body)]
    assert (first["prompt_token_ids"], first["token_ids"]) == ([BOS, *b"hi"], [*b"Hel"])
    assert second["token_ids"] == [*b"l"]
    assert "prompt_token_ids" not in second


async def test_tokens_as_ids_by_request_and_by_server(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    body = {"prompt": "hi", "max_tokens": 1, "logprobs": 0}
    as_ids = {**body, "return_tokens_as_token_ids": True}
    assert (await post(client, PATH, **as_ids))["choices"][0]["logprobs"]["tokens"] == ["token_id:72"]
    assert (await post(client, PATH, **body))["choices"][0]["logprobs"]["tokens"] == ["H"]
    async with make_client(make_app(frontend, return_tokens_as_token_ids=True)) as other:
        assert (await post(other, PATH, **body))["choices"][0]["logprobs"]["tokens"] == ["token_id:72"]
        as_text = {**body, "return_tokens_as_token_ids": False}
        assert (await post(other, PATH, **as_text))["choices"][0]["logprobs"]["tokens"] == ["H"]


async def test_special_tokens_can_be_shown(client: httpx.AsyncClient) -> None:
    shown = await post(client, PATH, prompt=[BOS, 104], echo=True, skip_special_tokens=False, ignore_eos=True)
    assert shown["choices"][0]["text"] == "<bos>hHello, world.<eos>"
    hidden = await post(client, PATH, prompt=[BOS, 104], echo=True, ignore_eos=True)
    assert hidden["choices"][0]["text"] == "hHello, world."


async def test_eos_is_counted_and_not_shown(client: httpx.AsyncClient) -> None:
    [choice] = (await post(client, PATH, prompt="hi", logprobs=0, return_token_ids=True))["choices"]
    assert choice["token_ids"][-1] == EOS
    assert choice["logprobs"]["text_offset"][-1] == len(choice["text"])
