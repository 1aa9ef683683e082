"""POST /api/chat and /api/generate, whole and in lines."""

import base64
from typing import Any

import httpx
import pytest
from fake_frontend import FakeFrontend
from media_frontend import PAD, PICTURE, SMALL, seeing

CHAT, GENERATE = "/api/chat", "/api/generate"
TALK = [{"role": "user", "content": "hi"}]
PROMPT: dict[str, Any] = {"model": "tiny", "prompt": "hi"}


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any], **more: Any) -> Any:
    response = await client.post(path, json={**body, "stream": False, **more})
    assert response.status_code == 200, response.text
    return response.json()


async def refusal(client: httpx.AsyncClient, path: str, body: dict[str, Any], status: int = 400) -> str:
    response = await client.post(path, json=body)
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    return response.json()["error"]


@pytest.mark.parametrize("file", [PICTURE, SMALL])
async def test_pictures_in_base64(frontend: FakeFrontend, client: httpx.AsyncClient, file: bytes) -> None:
    data = base64.b64encode(file).decode()
    async with seeing(frontend):
        await ask(client, GENERATE, PROMPT, images=[data, data])
        prompt = frontend.asked[-1][0]
        assert len(frontend.asked[-1][2]["media"]) == 2  # type: ignore[arg-type]
        assert prompt[-3:] == [*b"hi|"] and prompt.count(PAD + 1) == 2
        await ask(client, CHAT, {"model": "tiny", "messages": [{**TALK[0], "images": [data]}]})
        assert frontend.asked[-1][0].count(PAD + 1) == 1
        await ask(client, GENERATE, PROMPT, images=[f"data:image/png;base64,{data}"])
        assert frontend.asked[-1][0].count(PAD + 1) == 1
        assert "base64" in await refusal(client, GENERATE, {**PROMPT, "images": ["no picture"]})
