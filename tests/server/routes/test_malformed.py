"""Malformed bodies: one readable 400 each, in the shape of the API."""

from typing import Any

import httpx
import pytest

TEXT, TALK = "/v1/completions", "/v1/chat/completions"
MESSAGES = b'"messages": [{"role": "user", "content": "hi"}]'


async def refusal_of(client: httpx.AsyncClient, path: str, body: bytes) -> Any:
    response = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == 400
    assert len(error["message"]) <= 1000
    return error


@pytest.mark.parametrize(
    ("body", "param", "details"),
    [
        (
            b'{"a":',
            "body.5",
            "'type': 'json_invalid', 'loc': 'body.5', 'msg': 'JSON decode error', "
            "'input': '<dict of 0 items>', 'ctx': {'error': 'Expecting value'}",
        ),
        (
            b'{"prompt": "a", "max_tokens": "x"}',
            "body.max_tokens",
            "'type': 'int_parsing', 'loc': 'body.max_tokens', 'msg': 'Input should be a valid integer, "
            "unable to parse string as an integer', 'input': 'x'",
        ),
    ],
)
async def test_a_whole_error(client: httpx.AsyncClient, body: bytes, param: str, details: str) -> None:
    message = f"1 validation error:\n  {{{details}}}"
    expected = {"message": message, "type": "Bad Request", "param": param, "code": 400}
    assert await refusal_of(client, TEXT, body) == expected


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TALK, b'{"model": "tiny"}', "body.messages"),
        (TALK, b'{"messages": "hi"}', "body.messages"),
        (TALK, b'{"messages": []}', "body.messages"),
        (TALK, b'{"messages": [{"role": "hacker", "content": "a"}]}', "body.messages.0.role"),
        (TALK, b'{"messages": [{"role": "user", "content": 5}]}', "body.messages.0.content"),
        (
            TALK,
            b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "body.messages.0.content",
        ),
        (TALK, b"{" + MESSAGES + b', "tools": [{"type": "function"}]}', "body.tools.0.function"),
        (TALK, b"{" + MESSAGES + b', "reasoning_effort": "some"}', "body.reasoning_effort"),
        (TALK, b"{" + MESSAGES + b', "logprobs": 3}', "body.logprobs"),
        (TEXT, b'{"prompt": 5}', "body.prompt"),
        (TEXT, b'{"prompt": "a", "stream": "yes"}', "body.stream"),
        (TEXT, b'{"prompt": "a", "seed": 1e400}', "body.seed"),
        (TEXT, b'{"prompt": "a", "max_tokens": 9223372036854775808000000}', "max_tokens"),
        (TEXT, b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (TEXT, b'{"prompt": "a", "min_p": Infinity}', "min_p"),
        (TEXT, b'{"prompt": "a", "presence_penalty": NaN}', "presence_penalty"),
        (TEXT, b'{"prompt": "a", "logit_bias": {"1": NaN}}', "logit_bias"),
        (TEXT, b"[1, 2]", "body"),
        (TEXT, b"null", "body"),
        (TEXT, b'"hi"', "body"),
        (TEXT, b"", "body"),
        ("/tokenize", b'{"prompt": 5}', "body.prompt"),
        ("/detokenize", b'{"tokens": [-1]}', "body.tokens.0"),
        ("/detokenize", b'{"tokens": ["a"]}', "body.tokens.0"),
        ("/detokenize", b"{}", "body.tokens"),
    ],
)
async def test_the_error_names_the_place(
    client: httpx.AsyncClient, path: str, body: bytes, param: str
) -> None:
    error = await refusal_of(client, path, body)
    assert error["param"] == param
    if param.startswith("body"):
        assert error["message"].startswith("1 validation error:\n")


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a\\ud800"}',
        b'{"prompt": "a", "model": "\\ud800"}',
        b'{"prompt": "a", "\\ud800": 1}',
        b'{"prompt": "a", "max_tokens": "\\ud800"}',
        b'{"prompt": "a", "cache_salt": "\\ud800"}',
        b'{"prompt": "a", "bad_words": ["\\ud800"]}',
        b'{"prompt": "a", "stop": ["\\ud800"]}',
        b'{"prompt": "a", "logit_bias": {"\\ud800": 1}}',
        b'{"prompt": "a", "truncation_side": "\\ud800"}',
        b'{"prompt": "a", "request_id": "\\ud800"}',
    ],
)
async def test_half_a_character_anywhere(client: httpx.AsyncClient, body: bytes) -> None:
    error = await refusal_of(client, TEXT, body)
    assert "surrogate" in error["message"] or b'"prompt": "a\\ud800"' not in body


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"max_tokens": ' + b"9" * 10_000 + b"}", b'{"prompt": "\xff"}']
)
async def test_json_that_cannot_be_read(client: httpx.AsyncClient, body: bytes) -> None:
    await refusal_of(client, TEXT, body)


async def test_a_thousand_mistakes_make_a_short_answer(client: httpx.AsyncClient) -> None:
    ids = b", ".join(b'"x"' for _ in range(1000))
    error = await refusal_of(client, "/detokenize", b'{"tokens": [' + ids + b"]}")
    assert error["message"].count("\n") <= 5
