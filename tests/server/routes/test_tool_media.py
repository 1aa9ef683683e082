"""Pictures that tools have answered: shown to the model, or a text in their place."""

from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from fake_api import post, refusal
from fake_frontend import FakeFrontend
from media_frontend import PAD, PICTURE, data_url, seeing
from msgspec.structs import replace

from server.http import endpoint
from server.media.media_reader import MediaReader

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
async def reader(frontend: FakeFrontend) -> AsyncIterator[MediaReader]:
    async with seeing(frontend) as reader:
        frontend.facts = replace(frontend.facts, max_model_len=1024)
        yield reader


def user(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def prompt(frontend: FakeFrontend) -> str:
    """The last prompt, with [####] for a picture of four tokens."""
    names = {PAD: "#", PAD + 1: "[", PAD + 2: "]"}
    return "".join(names.get(id) or chr(id) for id in frontend.asked[-1][0])


async def test_results_of_tools_may_be_pictures(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": data_url(PICTURE).partition(",")[2]}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "image", "source": source}]}
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [call]}, *user(result)]
    await post(client, "/v1/messages", model="tiny", max_tokens=2, messages=talk)
    assert "[####]" in prompt(frontend)


BROKEN = data_url(b"x" * 9000)
UNREADABLE = [BROKEN, data_url(b"x"), "http://127.0.0.1/a", "gopher://x"]
LOST = "[picture that could not be read]"
CALL = {"id": "c1", "function": {"name": "look", "arguments": "{}"}}


@pytest.mark.parametrize(("elsewhere", "parser"), [(False, "auto"), (True, "auto"), (False, "hermes")])
async def test_pictures_of_a_tool_that_cannot_be_read_are_text(
    client: httpx.AsyncClient,
    frontend: FakeFrontend,
    elsewhere: bool,
    parser: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    frontend.reading = replace(frontend.reading, tool_call_parser=parser)
    urls = [*UNREADABLE, data_url(PICTURE)]
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": shown},
    ]
    with patch.object(endpoint, "is_long", lambda raw: elsewhere):
        response = await client.post(CHAT, json={"messages": talk})
    assert response.status_code == 200
    assert LOST * 4 + "[####]" in "".join(prompt(frontend).split("\n"))
    assert "could not be read, shown as text (4)" in response.headers["warning"]
    assert "a file in a tool's result is left out" in caplog.text


async def test_the_same_in_other_apis(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": BROKEN.partition(",")[2]}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "image", "source": source}]}
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [call]}, *user(result)]
    await post(client, "/v1/messages", model="tiny", max_tokens=2, messages=talk)
    assert LOST in prompt(frontend)
    items = [
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_image", "image_url": BROKEN}],
        },
    ]
    await post(client, "/v1/responses", model="tiny", input=[{"role": "user", "content": "a"}, *items])
    assert LOST in prompt(frontend)


async def test_a_picture_that_the_user_sends_too_has_to_be_readable(client: httpx.AsyncClient) -> None:
    part = {"type": "image_url", "image_url": BROKEN}
    talk = [{"role": "tool", "tool_call_id": "c1", "content": [part]}, *user(part)]
    assert "A picture must be one of" in (await refusal(client, CHAT, messages=talk))["message"]
