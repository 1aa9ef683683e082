"""Malformed bodies: one readable 400 each, in the shape of the API."""

from typing import Any

import httpx
import pytest

TEXT, TALK = "/v1/completions", "/v1/chat/completions"


async def refusal_of(client: httpx.AsyncClient, path: str, body: bytes) -> Any:
    response = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == 400
    assert len(error["message"]) <= 1000
    return error


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
