"""POST /tokenize and /detokenize."""

from typing import Any

import httpx
import pytest


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {"prompt": "x" * 3_000_000}, "This model's maximum context length is 128 tokens"),
        ("/detokenize", {"tokens": [1] * 2049}, "`tokens` may hold at most 2048 ids, got 2049."),
    ],
)
async def test_too_much_is_refused(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], message: str
) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


async def test_offsets_are_the_characters_of_each_token(client: httpx.AsyncClient) -> None:
    """A character of two bytes is two tokens here, which go over the same character."""
    body = {"prompt": "h é", "return_token_offsets": True}
    answer = (await client.post("/tokenize", json=body)).json()
    assert answer["token_offsets"] == [[0, 0], [0, 1], [1, 2], [2, 3], [2, 3]]
    assert len(answer["tokens"]) == 5
    talk = {"messages": [{"role": "user", "content": "<bos>"}], "return_token_offsets": True}
    assert (await client.post("/tokenize", json=talk)).json()["token_offsets"] is None
