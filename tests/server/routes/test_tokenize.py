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
