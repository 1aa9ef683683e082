"""POST /prewarm, and what of requests pins prefixes."""

from typing import Any

import httpx
import pytest
from fake_api import post, refusal
from fake_frontend import BOS, FakeFrontend

HI = [{"role": "user", "content": "hi"}]
MARKED = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
PREWARM, CHAT, MESSAGES = "/prewarm", "/v1/chat/completions", "/v1/messages"


@pytest.mark.parametrize(
    ("body", "prompts"),
    [
        ({"prompt": ["ab", "c"]}, [[BOS, 97, 98], [BOS, 99]]),
        ({"prompt": [5, 6, 7], "max_tokens": 9, "n": 3, "stream": True}, [[5, 6, 7]]),
        ({"messages": HI, "tool_choice": "none"}, [list(b"<user>hi\n<assistant>")]),
    ],
)
async def test_prompts_are_computed_and_no_answer_is(
    client: httpx.AsyncClient, frontend: FakeFrontend, body: dict[str, Any], prompts: list[list[int]]
) -> None:
    frontend.cached = 1
    answer = await post(client, PREWARM, **body)
    assert answer.pop("id").startswith("prewarm-") and answer.pop("created")
    total, found = sum(map(len, prompts)), len(prompts)
    counts = {"prompt_tokens": total, "computed_tokens": total - found, "cached_tokens": found}
    assert answer == {"object": "prewarm", "model": "org/tiny", **counts}
    assert [prompt for prompt, _, _ in frontend.asked] == prompts
    for _, sampling, rest in frontend.asked:
        assert (sampling.max_tokens, sampling.n, rest["stores"], rest.get("pins")) == (1, 1, True, None)


@pytest.mark.usefixtures("embedder")
async def test_texts_are_pooled(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    answer = await post(client, PREWARM, input=["ab", "c"], prompt_cache_key="k")
    assert (answer["prompt_tokens"], answer["computed_tokens"]) == (5, 5)
    [(items, rest)] = frontend.pooled
    assert len(items) == 2 and rest["stores"] and rest["pins"]


async def test_what_cannot_be_computed_is_refused(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    assert "`messages` as for" in (await refusal(client, PREWARM, model="tiny"))["message"]
    assert "Unknown field" in (await refusal(client, PREWARM, prompt="a", promt="b"))["message"]
    frontend.serve("embed")
    assert "'generate'" in (await refusal(client, PREWARM, prompt="a"))["message"]


async def test_a_key_or_a_mark_pins(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    talk = {"model": "tiny", "max_tokens": 5}
    asked: list[tuple[str, dict[str, Any], bool]] = [
        (CHAT, {"messages": HI}, False),
        (CHAT, {"messages": HI, "prompt_cache_key": "k"}, True),
        ("/v1/responses", {"input": "hi", "prompt_cache_key": "k"}, True),
        (MESSAGES, {"messages": HI, **talk}, False),
        (MESSAGES, {"messages": HI, "cache_control": {"type": "ephemeral"}, **talk}, True),
        (MESSAGES, {"messages": [{"role": "user", "content": MARKED}], **talk}, True),
        (MESSAGES, {"messages": HI, "system": MARKED, **talk}, True),
    ]
    for path, body, _ in asked:
        await post(client, path, **body)
    assert [rest.get("pins", False) for _, _, rest in frontend.asked] == [pins for _, _, pins in asked]
