"""`include: ["cache_diagnosis"]` over HTTP: where it stands in each answer, and who may ask."""

from __future__ import annotations

import httpx
import pytest
from fake_api import post, post_stream, refusal
from fake_frontend import FakeFrontend

from engine_core.protocol import CacheMiss

CHAT, COMPLETIONS, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
TALK = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
ASKS = {"include": ["cache_diagnosis"]}
PLACE = len("<user>Hello\n<assistant>")


@pytest.fixture(autouse=True)
def missed(frontend: FakeFrontend) -> None:
    frontend.cached, frontend.miss = 16, CacheMiss("different_token", PLACE)


async def test_a_chat_names_the_message(client: httpx.AsyncClient) -> None:
    found = (await post(client, CHAT, messages=TALK, n=2, **ASKS))["cache_diagnosis"]
    assert "Keep all text before this place exactly" in found.pop("advice")
    assert found == {
        "cached_tokens": 16,
        "prompt_tokens": len("<user>Hello\n<assistant>Hi\n<assistant>"),
        "reason": "different_token",
        "matched_tokens": PLACE,
        "message": 1,
        "role": "assistant",
        "text_around": "sistant>Hi\n<assistant>",
    }


async def test_nobody_is_told_who_does_not_ask(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    assert "cache_diagnosis" not in await post(client, CHAT, messages=TALK)
    assert "diagnoses" not in frontend.asked[-1][2]


@pytest.mark.parametrize("usage", [True, False])
async def test_a_stream_tells_it_in_its_last_chunk(client: httpx.AsyncClient, usage: bool) -> None:
    options = {"stream_options": {"include_usage": usage}, **ASKS}
    *others, last = await post_stream(client, CHAT, messages=TALK, **options)
    assert last["choices"] == [] and ("usage" in last) == usage
    assert last["cache_diagnosis"]["message"] == 1
    assert not any("cache_diagnosis" in chunk for chunk in others)


async def test_many_prompts_have_a_list(client: httpx.AsyncClient) -> None:
    found = (await post(client, COMPLETIONS, prompt=["x" * 30, "y" * 40], **ASKS))["cache_diagnosis"]
    assert [one["prompt_tokens"] for one in found] == [31, 41]
    assert all(one["message"] is None for one in found)
    only = (await post(client, COMPLETIONS, prompt="x" * 30, **ASKS))["cache_diagnosis"]
    assert only["prompt_tokens"] == 31


async def test_a_cut_prompt_is_truncated(client: httpx.AsyncClient) -> None:
    found = await post(client, COMPLETIONS, prompt="x" * 60, truncate_prompt_tokens=30, **ASKS)
    assert found["cache_diagnosis"]["reason"] == "truncated"


@pytest.mark.usefixtures("embedder")
async def test_pooled_texts_are_told_too(client: httpx.AsyncClient) -> None:
    found = (await post(client, EMBED, input=["x" * 30, "y" * 40], **ASKS))["cache_diagnosis"]
    assert [one["prompt_tokens"] for one in found] == [31, 41]
    assert "cache_diagnosis" not in await post(client, EMBED, input="x")
    cut = {"truncate_prompt_tokens": 30, "truncation_side": "left", **ASKS}
    assert (await post(client, EMBED, input="x" * 60, **cut))["cache_diagnosis"]["reason"] == "truncated"


@pytest.mark.usefixtures("embedder")
async def test_bytes_have_no_place_for_it(client: httpx.AsyncClient) -> None:
    error = await refusal(client, EMBED, input="x", encoding_format="bytes", include=["cache_diagnosis"])
    assert error["param"] == "include" and "Use float or base64" in error["message"]


@pytest.mark.usefixtures("embedder")
async def test_unknown_parts_are_refused_by_name(client: httpx.AsyncClient) -> None:
    for path, body in ((CHAT, {"messages": TALK}), (COMPLETIONS, {"prompt": "a"}), (EMBED, {"input": "a"})):
        error = await refusal(client, path, **body, include=["cache"])
        assert error["param"] == "body.include.0" and "'timing'" in error["message"]
        await post(client, path, **body, include=None)
