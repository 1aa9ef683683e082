"""Conversations with pictures, in each API that takes them: what the engine gets, and what is refused."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from io import BytesIO
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import pytest
import torch
from fake_api import leave, make_app, make_client, post, refusal
from fake_frontend import FakeFrontend
from media_files import noise, saved
from media_frontend import FILES, PAD, PICTURE, SMALL, WIDTH, data_url, seeing
from msgspec.structs import replace
from PIL import Image
from starlette.types import ASGIApp

from engine_core.prompt_media import Media
from models.media.registry import make_processor
from server.http import endpoint
from server.media.inline_files import SHORTEST, InlineFiles
from server.media.media_parts import MediaFile
from server.media.media_reader import MediaReader

CHAT = "/v1/chat/completions"


@pytest.fixture
async def reader(frontend: FakeFrontend) -> AsyncIterator[MediaReader]:
    async with seeing(frontend) as reader:
        yield reader


def image(file: bytes = PICTURE, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(file)}, **more}


def user(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def items(frontend: FakeFrontend, asked: int = -1) -> tuple[Media, ...]:
    return frontend.asked[asked][2].get("media", ())  # pyright: ignore[reportReturnType]


def sent(frontend: FakeFrontend, asked: int = -1) -> tuple[list[int], list[tuple[bytes, int]]]:
    """The tokens of a prompt, the last one, and the hashes and places of its items."""
    return frontend.asked[asked][0], [(item.hash, item.at) for item in items(frontend, asked)]


SEEN = [*b"<user>see ", PAD + 1, *[PAD] * 4, PAD + 2, *b" it|"]
CONVERSATION = user(text("see "), image(), text(" it"))


async def test_the_engine_gets_a_prompt_and_its_items(
    client: httpx.AsyncClient, frontend: FakeFrontend, reader: MediaReader
) -> None:
    assert len(PICTURE) > SHORTEST
    await post(client, CHAT, messages=CONVERSATION)
    tokens, media = sent(frontend)
    prepared = make_processor(FILES).prepare(noise(56, 56))
    assert tokens == SEEN
    [item] = items(frontend)
    assert (item.at, item.length, item.runs, item.kind) == (11, 4, ((0, 4),), "image")
    assert (item.shape, item.grid) == (prepared.shape, prepared.grid)
    assert bytes(item.pixels.data) == bytes(prepared.pixels)
    await post(client, CHAT, messages=CONVERSATION, n=2, max_tokens=1)
    assert sent(frontend)[1] == media and (reader.kept.queries, reader.kept.hits) == (2, 1)


async def test_a_part_without_a_type_is_told_by_its_field(
    client: httpx.AsyncClient, frontend: FakeFrontend, reader: MediaReader
) -> None:
    for file in (PICTURE, SMALL):
        await post(client, CHAT, messages=user(image(file)))
        named = sent(frontend)
        await post(client, CHAT, messages=user({"image_url": data_url(file)}))
        assert sent(frontend) == named and named[1]
    error = await refusal(client, CHAT, messages=user({"picture": data_url(SMALL)}))
    assert "should be an object such as" in error["message"]


async def test_long_conversations_are_read_by_the_helper(
    client: httpx.AsyncClient, frontend: FakeFrontend, reader: MediaReader
) -> None:
    with patch.object(endpoint, "is_long", lambda raw: True):
        await post(client, CHAT, messages=CONVERSATION)
    assert frontend.read_elsewhere == ["chat", "chat"]
    assert (sent(frontend)[0], len(sent(frontend)[1])) == (SEEN, 1)


@pytest.mark.parametrize("file", [PICTURE, SMALL])
async def test_other_apis_have_pictures_too(
    client: httpx.AsyncClient, frontend: FakeFrontend, reader: MediaReader, file: bytes
) -> None:
    await post(client, CHAT, messages=user(image(file), text("?")))
    tokens, media = sent(frontend)
    parts = [{"type": "input_image", "image_url": data_url(file)}, {"type": "input_text", "text": "?"}]
    await post(client, "/v1/responses", model="tiny", input=user(*parts))
    assert sent(frontend) == (tokens, media)
    base64 = data_url(file).partition(",")[2]
    inline = {"type": "base64", "media_type": "image/png", "data": base64}
    for source in (inline, {"type": "url", "url": data_url(file)}):
        messages = user({"type": "image", "source": source}, text("?"))
        await post(client, "/v1/messages", model="tiny", max_tokens=2, messages=messages)
        assert sent(frontend) == (tokens, media)
    counted = await post(client, "/v1/messages/count_tokens", model="tiny", messages=messages)
    assert counted["input_tokens"] == len(tokens)
    assert (await post(client, "/tokenize", messages=user(image(file), text("?"))))["tokens"] == tokens
    counted = await post(client, "/v1/responses/input_tokens", model="tiny", input=user(*parts))
    assert counted["input_tokens"] == len(tokens)


async def test_conversations_of_a_batch_have_pictures_of_their_own(
    client: httpx.AsyncClient, frontend: FakeFrontend, reader: MediaReader
) -> None:
    talks = [user(image()), user(text("none")), user(image(SMALL), image())]
    for talk in talks:
        await post(client, CHAT, messages=talk)
    alone = [sent(frontend, place) for place in range(-3, 0)]
    await post(client, f"{CHAT}/batch", messages=talks)
    assert [sent(frontend, place) for place in range(-3, 0)] == alone


async def test_named_items_need_no_content_again(
    client: httpx.AsyncClient, frontend: FakeFrontend, reader: MediaReader
) -> None:
    await post(client, CHAT, messages=user(image(uuid="a")), cache_salt="s")
    known = sent(frontend)
    nothing = {"type": "image_url", "image_url": None, "uuid": "a"}
    await post(client, CHAT, messages=user(nothing), cache_salt="s")
    assert sent(frontend) == known
    error = await refusal(client, CHAT, status=422, messages=user(nothing))
    assert error["message"] == "No media item is kept under the uuid 'a': send its content too."
    video = {"type": "video_url", "video_url": None, "uuid": "a"}
    await refusal(client, CHAT, status=422, messages=user(video), cache_salt="s")


@pytest.mark.usefixtures("takes_embeds")
async def test_half_a_surrogate_pair_is_a_name_and_no_base64(
    client: httpx.AsyncClient, frontend: FakeFrontend
) -> None:
    async def answered(part: Any) -> httpx.Response:
        body = json.dumps({"messages": user(part)}).encode()  # which httpx itself would not encode
        return await client.post(CHAT, content=body, headers={"content-type": "application/json"})

    for part in (image(uuid="\ud800"), {"type": "image_url", "image_url": None, "uuid": "\ud800"}):
        assert (await answered(part)).status_code == 200 and items(frontend)
    for given in ("\ud800", {"image_embeds": "QUJD", "image_grid_thw": "\ud800"}):
        error = await answered({"type": "image_embeds", "image_embeds": given})
        assert error.status_code == 400 and "image_embeds" in error.text


async def test_usage_counts_the_tokens_of_items(frontend: FakeFrontend, reader: MediaReader) -> None:
    frontend.cached = 5
    async with make_client(make_app(frontend, enable_prompt_tokens_details=True)) as client:
        usage = (await post(client, CHAT, messages=user(image(), image(SMALL))))["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 5, "multimodal_tokens": 10}
        usage = (await post(client, CHAT, messages=user(text("a"))))["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 5}


async def test_requests_may_have_settings_if_the_operator_trusts_them(
    client: httpx.AsyncClient, frontend: FakeFrontend, reader: MediaReader
) -> None:
    body = {"messages": user(image()), "mm_processor_kwargs": {"min_pixels": 12544}}
    assert "--trust-request-mm-kwargs is not set" in (await refusal(client, CHAT, **body))["message"]
    frontend.reading = replace(frontend.reading, trust_request_mm_kwargs=True)
    await post(client, CHAT, **body)
    assert frontend.asked[-1][0].count(PAD) == 16
    for settings, message in (
        ({"pixels": 1}, "no setting 'pixels', but fps, image_mean, image_std, max_frames, max_pixels"),
        ({"min_pixels": -1}, "Expected `int` >= 1"),
        ({"min_pixels": 1 << 24, "max_pixels": 1}, "no picture has"),
    ):
        error = await refusal(client, CHAT, messages=user(image()), mm_processor_kwargs=settings)
        assert message in error["message"] and error["param"] == "mm_processor_kwargs"


async def test_requests_may_say_how_files_are_read(
    client: httpx.AsyncClient, frontend: FakeFrontend, reader: MediaReader
) -> None:
    file = saved(Image.new("RGBA", (56, 56), (9, 9, 9, 0)))
    body = {"messages": user(image(file)), "media_io_kwargs": {"image": {"rgba_background_color": [1, 2, 3]}}}
    error = await refusal(client, CHAT, **body)
    assert "media_io_kwargs is passed" in error["message"] and error["param"] == "media_io_kwargs"
    frontend.reading = replace(frontend.reading, trust_request_mm_kwargs=True)
    for color, sent in ((body, bytes((1, 2, 3))), ({"messages": body["messages"]}, b"\xff" * 3)):
        await post(client, CHAT, **color)
        [item] = items(frontend)
        assert bytes(item.pixels.data[:6]) == sent * 2
    for io, message in (
        ({"image": {"mode": "RGBA"}}, "unknown field `mode`"),
        ({"audio": {}}, "unknown field `audio`"),
        ({"image": {"rgba_background_color": [1, 2, 256]}}, "Expected `int` <= 255"),
        ({"video": {"num_frames": 0}}, "take at least one frame, or all with -1"),
    ):
        error = await refusal(client, CHAT, messages=user(image()), media_io_kwargs=io)
        assert message in error["message"] and error["param"] == "media_io_kwargs"


async def test_metrics_count_items(
    client: httpx.AsyncClient, frontend: FakeFrontend, reader: MediaReader
) -> None:
    for _ in range(2):
        await post(client, CHAT, messages=CONVERSATION)
    await refusal(client, CHAT, messages=user({"type": "image_url", "image_url": "file:///a"}))
    page = frontend.metrics.page().decode()
    for line in (
        'vllm:mm_cache_queries_total{engine="0",model_name="org/tiny"} 2.0',
        'vllm:mm_cache_hits_total{engine="0",model_name="org/tiny"} 1.0',
        'facet:media_refused_total{model_name="org/tiny",reason="read"} 1.0',
        'facet:media_seconds_count{model_name="org/tiny",stage="prepare"} 2.0',
    ):
        assert line in page


def embeds(rows: Any, grid: Any = (1, 4, 4), **more: Any) -> dict[str, Any]:
    """A part with embeddings and their grid, as vLLM's clients send tensors."""
    file = BytesIO()
    torch.save(rows, file)
    data = base64.b64encode(file.getvalue()).decode()
    inside = data if grid is None else {"image_embeds": data, "image_grid_thw": grid}
    return {"type": "image_embeds", "image_embeds": inside, **more}


ROWS = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


@pytest.fixture
async def takes_embeds(frontend: FakeFrontend) -> AsyncIterator[MediaReader]:
    async with seeing(frontend, enable_mm_embeds=True) as reader:
        yield reader


@pytest.mark.parametrize("elsewhere", [True, False])
async def test_pictures_may_be_embeddings(
    client: httpx.AsyncClient, frontend: FakeFrontend, takes_embeds: MediaReader, elsewhere: bool
) -> None:
    grid = embeds(torch.tensor([1, 4, 4]), None)["image_embeds"]
    with patch.object(endpoint, "is_long", lambda raw: elsewhere):
        await post(client, CHAT, messages=user(text("see "), embeds(ROWS, grid, uuid="a"), text(" it")))
        assert sent(frontend)[0] == SEEN
        [item] = items(frontend)
        assert (item.kind, item.shape, item.grid) == ("encoded", (4, WIDTH, 4), (1, 4, 4))
        assert (item.at, item.length, item.runs) == (11, 4, ((0, 4),))
        assert np.array_equal(np.frombuffer(item.pixels.data, np.float32), ROWS.numpy().ravel())
        named = {"type": "image_embeds", "image_embeds": None, "uuid": "a"}
        small = embeds(ROWS[:1].half(), [1, 2, 2])
        assert (
            len(small["image_embeds"]["image_embeds"])
            < SHORTEST
            < len(embeds(ROWS)["image_embeds"]["image_embeds"])
        )
        await post(client, CHAT, messages=user(named, small, image()))
    first, second, third = items(frontend)
    assert first.hash == item.hash != second.hash and third.kind == "image"
    assert np.array_equal(np.frombuffer(second.pixels.data, np.float32), ROWS[0].half().float().numpy())


NO_PICTURES: list[tuple[dict[str, Any], str]] = [
    (embeds(ROWS, None), "A picture with no image_grid_thw has 0 embeddings"),
    (embeds(ROWS, [1, 4, 8]), "has 8 embeddings of this model, and image_embeds has 4"),
    (embeds(ROWS[:, 1:].contiguous()), f"finite numbers in rows of {WIDTH}"),
    (embeds(ROWS / 0), "finite numbers"),
    (embeds([ROWS]), "one contiguous tensor"),
    (embeds(ROWS, [1, 4]), "needs a file in base64 in `image_embeds`"),
    (embeds(ROWS, 7), "needs a file in base64 in `image_embeds`"),
    ({"type": "image_embeds"}, "needs a file in base64 in `image_embeds`"),
    ({"type": "image_embeds", "image_embeds": {"pixels": "AAAA"}}, "needs a file in base64"),
    ({"type": "image_embeds", "image_embeds": "inline:0"}, "one contiguous tensor"),
    ({"type": "image_embeds", "image_embeds": "é"}, "one contiguous tensor"),
]


@pytest.mark.usefixtures("takes_embeds")
async def test_embeddings_that_are_no_picture_are_refused(
    client: httpx.AsyncClient, frontend: FakeFrontend
) -> None:
    for part, message in NO_PICTURES:
        assert message in (await refusal(client, CHAT, messages=user(part)))["message"]
    assert not frontend.asked


async def test_the_operator_allows_embeddings(client: httpx.AsyncClient, reader: MediaReader) -> None:
    error = await refusal(client, CHAT, messages=user(embeds(ROWS)))
    assert "--enable-mm-embeds" in error["message"] and error["param"] == "messages"


UNREADABLE = [
    ("file:///etc/passwd", "runs without --allowed-local-media-path"),
    ("http://127.0.0.1/a", "no public address"),
    ("gopher://x", "must begin with data:, http:, https: or file:"),
    ("inline:1", "must begin with data:, http:, https: or file:"),
    (data_url(b"x" * 9000), "A picture must be one of"),
    (data_url(b"x"), "A picture must be one of"),
    ("data:image/png;base64,", "A picture must be one of"),
]


async def test_items_that_cannot_be_read(client: httpx.AsyncClient, reader: MediaReader) -> None:
    for url, message in UNREADABLE:
        part = {"type": "image_url", "image_url": url}
        assert message in (await refusal(client, CHAT, messages=user(image(), part)))["message"]
    await post(client, CHAT, messages=CONVERSATION)


async def test_hosts_may_be_named_in_any_case(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    part = {"type": "image_url", "image_url": "http://LOCALHOST:1/a.png"}
    async with seeing(frontend, allowed_media_domains=["LocalHost"]):
        assert "is not reached" in (await refusal(client, CHAT, status=422, messages=user(part)))["message"]
    async with seeing(frontend, allowed_media_domains=["example.com"]):
        assert "--allowed-media-domains" in (await refusal(client, CHAT, messages=user(part)))["message"]


@pytest.mark.parametrize("elsewhere", [True, False])
async def test_nothing_is_fetched_for_a_client_that_has_left(
    app: ASGIApp, reader: MediaReader, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    ended = asyncio.Event()

    async def read(url: str) -> MediaFile:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        raise AssertionError(url)

    monkeypatch.setattr(reader, "read", read)
    monkeypatch.setattr(endpoint, "is_long", lambda raw: elsewhere)
    part = {"type": "image_url", "image_url": "http://example.com/a"}
    await leave(app, CHAT, {"messages": user(part)}, after=0)
    assert ended.is_set()


async def test_files_elsewhere_in_a_body_are_refused(client: httpx.AsyncClient, reader: MediaReader) -> None:
    error = await refusal(client, CHAT, messages=CONVERSATION, documents=[{"image_url": data_url(PICTURE)}])
    assert error["message"] == f"A file in base64 of more than {SHORTEST} bytes may be in a media part only."


async def test_a_text_that_is_a_data_url_is_text(
    client: httpx.AsyncClient, frontend: FakeFrontend, reader: MediaReader
) -> None:
    quoted = data_url(PICTURE)
    error = await refusal(client, CHAT, messages=user(text(quoted)))
    assert f"{len(quoted) + 7} characters" in error["message"]


async def test_a_server_may_be_told_how_many_items_it_takes(
    client: httpx.AsyncClient, frontend: FakeFrontend
) -> None:
    async with seeing(frontend, limit_mm_per_prompt={"image": 1}):
        error = await refusal(client, CHAT, messages=user(image(SMALL), image(SMALL)))
        assert "At most 1 image(s)" in error["message"]
    frontend.media = None
    async with seeing(frontend, max_media_mb=1):
        large = saved(Image.effect_noise((1200, 800), 90))
        error = await refusal(client, CHAT, status=413, messages=user(*[image(large)] * 5))
        files = user(*[image(large)] * 30)
        error = await refusal(client, CHAT, status=413, messages=files)
        assert "smaller media, of which --max-media-mb is the limit" in error["message"]


def test_long_files_are_cut_out_of_bodies() -> None:
    long, short = data_url(b"x" * SHORTEST), data_url(b"x" * 99)
    sound = {"type": "input_audio", "input_audio": {"format": "wav", "data": "QUJD" * SHORTEST}}
    parts = [
        {"image_url": {"detail": "low", "url": long}},
        {"image_url": [long, short]},
        sound,
        *({"text": long}, {"url": short}, {"url": "x" * 9000}),
        *({"input": {"url": long}}, {"type": "redacted_thinking", "data": "QUJD" * SHORTEST}),
    ]
    for raw in (
        *(json.dumps(parts), json.dumps(parts).replace("/", "\\/")),
        *(json.dumps(parts, indent=width) for width in (1, 40)),  # PowerShell indents by as much
    ):
        files = InlineFiles()
        left = json.loads(files.cut(raw.encode(), 1 << 20))
        assert left[0]["image_url"]["url"] == "inline:0" and left[1] == {"image_url": ["inline:1", short]}
        assert left[2]["input_audio"]["data"] == "inline:2"
        assert left[3:] == json.loads(raw)[3:]
        taken = files.take("inline:1")
        assert taken is not None and json.loads(b'"%s"' % bytes(taken.data)) == long.partition(",")[2]
        assert files.take("inline:1") is None
    ollama = {"messages": [{"role": "user", "images": ["QUJD" * SHORTEST] * 2}]}
    for width in (None, 40):
        left = json.loads(InlineFiles().cut(json.dumps(ollama, indent=width).encode(), 1 << 20))
        assert left["messages"][0]["images"] == ["inline:0", "inline:1"]
    escaped = json.dumps({"text": json.dumps({"url": long})})
    assert InlineFiles().cut(escaped.encode(), 1 << 20) == escaped.encode()
