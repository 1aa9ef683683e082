"""POST /v1/chat/completions, from the bytes of a request to the bytes of its answer."""

from typing import Any

import httpx
import msgspec
from fake_api import make_app, make_client, post, refusal
from fake_frontend import FakeFrontend

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


async def talk(client: httpx.AsyncClient, *messages: Any, **body: Any) -> Any:
    return await post(client, PATH, messages=messages or [USER], **body)


async def refusal_of(client: httpx.AsyncClient, **body: Any) -> Any:
    return await refusal(client, PATH, **{"messages": [USER], **body})


async def test_unknown_fields_pass_if_the_operator_says_so(frontend: FakeFrontend) -> None:
    await refusal_of(make_client(make_app(frontend)), zzzz=1)
    client = make_client(make_app(frontend, ignore_unknown_fields=True))
    await talk(client, zzzz=1)
    frontend.facts = msgspec.structs.replace(frontend.facts, max_model_len=100_000)
    await talk(client, *[USER] * 400, zzzz=1)  # the helper reads it
    assert frontend.read_elsewhere
