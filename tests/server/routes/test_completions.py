"""POST /v1/completions, from the bytes of a request to the bytes of its answer."""

from typing import Any

import httpx
import pytest
from fake_api import post, refusal
from fake_frontend import BOS, FakeFrontend

PATH = "/v1/completions"


async def test_prompts_run_together(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.delay = 0.01  # they are started a few at a time
    answer = await post(client, PATH, prompt=[f"prompt {i}" for i in range(40)], max_tokens=1)
    assert len(answer["choices"]) == 40
    assert (frontend.most_running, frontend.running, frontend.finished) == (40, 0, 40)


async def test_the_prompts_of_a_request_share_a_group(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    for _ in range(2):
        await post(client, PATH, prompt=["a", "b"])
    await post(client, PATH, prompt="c")
    assert [asked.get("group") for _, _, asked in frontend.asked] == [1, 1, 2, 2, None]


async def test_the_best_of_several_come_first(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.logprob_of = lambda choice: -float((choice * 2) % 5)  # the third and the first are the best
    answer = await post(client, PATH, prompt=["a", "b"], n=2, best_of=4, max_tokens=3, return_token_ids=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 4
    assert answer["usage"]["completion_tokens"] == 2 * 4 * 3
    shown = await post(client, PATH, prompt="a", n=2, best_of=4, max_tokens=3, logprobs=0)
    assert [choice["logprobs"]["token_logprobs"] for choice in shown["choices"]] == [[0.0] * 3, [-1.0] * 3]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_very_long_prompt_is_refused(client: httpx.AsyncClient, streamed: bool) -> None:
    error = await refusal(client, PATH, prompt="x" * 3_000_000, stream=streamed)
    assert "This model's maximum context length is 128 tokens." in error["message"]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, b"XYZ"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, b"XYZ"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, b"abc"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 100}, b"." * 25 + b"XYZ"),
        ({"truncate_prompt_tokens": -1, "max_tokens": None}, b"." * 109 + b"XYZ"),
    ],
)
async def test_truncation(
    frontend: FakeFrontend, client: httpx.AsyncClient, fields: dict[str, Any], kept: bytes
) -> None:
    prompt = "abc" + "." * 300_000 + "XYZ"
    answer = await post(client, PATH, prompt=prompt, add_special_tokens=False, echo=True, **fields)
    assert frontend.asked[0][0] == [*kept]
    assert answer["usage"]["prompt_tokens"] == len(kept)
    assert answer["choices"][0]["text"].startswith(kept.decode())


@pytest.mark.parametrize(("side", "kept"), [(None, b"YZ"), ("left", b"YZ"), ("right", b"ab")])
async def test_the_token_that_begins_a_text_stays_where_it_is_cut(
    frontend: FakeFrontend, client: httpx.AsyncClient, side: str | None, kept: bytes
) -> None:
    prompt = "abc" + "." * 300 + "XYZ"
    await post(client, PATH, prompt=prompt, truncate_prompt_tokens=3, truncation_side=side)
    assert frontend.asked[0][0] == [BOS, *kept]
