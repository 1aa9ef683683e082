"""`prompt_embeds` of completions and chats: what the engine gets, what is shown, and what is refused."""

import base64
import io
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fake_api import post, post_stream, refusal
from fake_frontend import FakeFrontend
from media_frontend import PICTURE, data_url, seeing

from engine_core.prompt_media import Media
from server.http.connection import body_limits
from server.media.prompt_embeds import cut_rows
from server.reading.body_table import USUAL_BODY

PATH = "/v1/completions"
ROWS = torch.linspace(-1, 1, 9 * 6).view(9, 6)


def encoded(rows: Any) -> str:
    file = io.BytesIO()
    torch.save(rows, file)
    return base64.b64encode(file.getvalue()).decode()


FILE = encoded(ROWS)


@pytest.fixture(autouse=True)
def takes_rows(frontend: FakeFrontend) -> None:
    frontend.serve("generate", row_width=6)


def media(frontend: FakeFrontend, asked: int = -1) -> tuple[Media, ...]:
    return frontend.asked[asked][2].get("media", ())  # pyright: ignore[reportReturnType]


def values(frontend: FakeFrontend, asked: int = -1) -> np.ndarray:
    [item] = media(frontend, asked)
    count = item.length
    assert (item.kind, item.at, item.runs, item.grid) == ("rows", 0, ((0, count),), (1, 1, count))
    assert item.shape == (count, 6, 4) and frontend.asked[asked][0] == [0] * count
    return np.frombuffer(item.pixels.data, np.float32).reshape(count, 6)


async def test_the_engine_gets_the_values(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    plain = await post(client, PATH, prompt="hi", max_tokens=3, return_token_ids=True)
    for prompt in ({}, {"prompt": None}, {"prompt": ""}, {"prompt": []}):
        body = {**prompt, "max_tokens": 3, "return_token_ids": True, "cache_salt": "a", "logprobs": 1}
        answer = await post(client, PATH, prompt_embeds=FILE, **body)
        [choice] = answer["choices"]
        assert np.array_equal(values(frontend), ROWS.numpy())
        assert frontend.asked[-1][2]["salt"] == "a"
        assert choice["text"] == plain["choices"][0]["text"]
        assert (choice["prompt_token_ids"], len(choice["token_ids"])) == ([], 3)
        assert answer["usage"]["prompt_tokens"] == 9
    chunks = await post_stream(
        client, PATH, prompt_embeds=[FILE], max_tokens=3, stream_options={"include_usage": True}
    )
    assert np.array_equal(values(frontend), ROWS.numpy())
    assert chunks[-1]["usage"]["prompt_tokens"] == 9


async def test_a_batch_of_one_is_a_prompt(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    await post(client, PATH, prompt_embeds=encoded(ROWS[None]), max_tokens=1)
    assert np.array_equal(values(frontend), ROWS.numpy())
    error = await refusal(client, PATH, prompt_embeds=encoded(ROWS.view(3, 3, 6)), max_tokens=1)
    assert "one contiguous tensor [tokens, 6]" in error["message"]


async def test_embeddings_come_before_texts(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    files = [FILE, encoded(ROWS[:4].half())]
    answer = await post(client, PATH, prompt_embeds=files, prompt=[[7, 8], [9]], n=2, max_tokens=1)
    assert len(answer["choices"]) == 8 and answer["usage"]["prompt_tokens"] == 9 + 4 + 2 + 1
    assert [len(asked[0]) for asked in frontend.asked] == [9, 4, 2, 1]
    assert np.array_equal(values(frontend, 1), ROWS[:4].half().float().numpy())
    assert media(frontend, 2) == media(frontend, 3) == ()


@pytest.mark.parametrize(("side", "kept"), [(None, ROWS[-2:]), ("left", ROWS[-2:]), ("right", ROWS[:2])])
async def test_prompts_are_cut(
    client: httpx.AsyncClient, frontend: FakeFrontend, side: str | None, kept: torch.Tensor
) -> None:
    more = {"truncate_prompt_tokens": 2, "truncation_side": side, "max_tokens": 1}
    await post(client, PATH, prompt_embeds=FILE, **more)
    assert np.array_equal(values(frontend), kept.numpy())


def test_long_prompts_are_several_items() -> None:
    rows = np.arange(600 * 2, dtype=np.float32).reshape(600, 2)
    items = [each.as_media() for each in cut_rows(rows)]
    assert [(each.at, each.length) for each in items] == [(0, 256), (256, 256), (512, 88)]
    assert b"".join(bytes(each.pixels.data) for each in items) == rows.tobytes()
    assert len({each.hash for each in items}) == 3


async def test_bodies_may_be_longer(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    error = await refusal(client, PATH, prompt_embeds="A" * USUAL_BODY)
    assert "torch.save" in error["message"]
    await refusal(client, PATH, status=413, prompt_embeds="A" * body_limits.MAX_BODY)
    frontend.serve("generate", row_width=0)
    await refusal(client, PATH, status=413, prompt_embeds="A" * USUAL_BODY)


CHAT = "/v1/chat/completions"
PART = {"type": "prompt_embeds", "data": FILE}


def said(*parts: Any, **more: Any) -> dict[str, Any]:
    texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"messages": [{"role": "user", "content": texts}], "max_tokens": 2, "seed": 1, **more}


def pieces(frontend: FakeFrontend, asked: int = -1) -> tuple[list[int | str], list[int]]:
    """The prompt with a letter in place of each token that is text, and where its embeddings begin."""
    ids, items = frontend.asked[asked][0], media(frontend, asked)
    found: list[Any] = [chr(id) for id in ids]
    for item in items:
        assert item.kind == "rows" and ids[item.at : item.end] == [0] * item.length
        found[item.at : item.end] = range(item.length)
    return found, [item.at for item in items]


async def test_chats_have_them_among_texts(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    second = {"data": encoded(ROWS[:2]), "type": "prompt_embeds"}
    answer = await post(client, CHAT, **said("one", PART, "two", second), return_token_ids=True)
    prompt, places = pieces(frontend)
    assert prompt == [*"<user>one\n", *range(9), *"\ntwo\n", 0, 1, *"\n<assistant>"] and places == [10, 24]
    items = media(frontend)
    assert [bytes(item.pixels.data) for item in items] == [r.numpy().tobytes() for r in (ROWS, ROWS[:2])]
    assert answer["usage"]["prompt_tokens"] == len(prompt) and not answer["prompt_token_ids"]
    counted = await post(client, "/tokenize", messages=said("one", PART)["messages"])
    assert counted["count"] == len("<user>one\n\n<assistant>") + 9


async def test_chats_have_them_behind_calls_that_are_written_as_text(
    client: httpx.AsyncClient, frontend: FakeFrontend
) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "", "tool_call_id": "a"},
    ]
    short = {**PART, "data": encoded(ROWS[:1])}
    await post(client, CHAT, messages=[*history, *said(short)["messages"]], max_tokens=1)
    prompt, [place] = pieces(frontend)
    assert prompt[place:] == [0, *"\n<assistant>"]


@pytest.mark.parametrize(
    ("side", "kept"), [("left", [7, 8, *"\n<assistant>"]), ("right", [*"<user>a\n", *range(6)])]
)
async def test_chats_are_cut(
    client: httpx.AsyncClient, frontend: FakeFrontend, side: str, kept: list[int | str]
) -> None:
    await post(client, CHAT, **said("a", PART), truncate_prompt_tokens=14, truncation_side=side)
    prompt, [place] = pieces(frontend)
    first = kept.index(7 if side == "left" else 0)
    assert len(prompt) == 14 and place == first
    [item] = media(frontend)
    rows = ROWS[7:] if side == "left" else ROWS[:6]
    assert bytes(item.pixels.data) == rows.numpy().tobytes()


async def test_chats_with_pictures_beside_them(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    frontend.serve("generate", row_width=40)
    async with seeing(frontend):
        picture = {"type": "image_url", "image_url": {"url": data_url(PICTURE)}}
        big = torch.linspace(-1, 1, 60 * 40).view(60, 40)  # more bytes than are left in a body
        for part in ({**PART, "data": encoded(big)}, {"data": encoded(big), "type": "prompt_embeds"}):
            await post(client, CHAT, **said("a<|image_pad|>", part, picture, "b"))
            found = media(frontend)
            assert [item.kind for item in found] == ["rows", "image"]
            assert found[0].length == 60 and found[1].at == found[0].end + 1


BROKEN = ROWS.clone()
BROKEN[1, 3] = float("inf")
