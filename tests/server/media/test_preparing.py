"""Processes that prepare media: what they give, what ends them, and that the next item is prepared."""

import asyncio
import base64
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from media_files import QWEN, noise, saved
from PIL import Image

from models.media.registry import make_processor
from server.errors import ApiError
from server.helpers.job import Ended
from server.helpers.job_queue import Helpers
from server.media.media_cache import KeptItem, MediaCache
from server.media.media_parts import MediaFile
from server.media.preparing import MEDIA, Preparer, PreparingLimits, PreparingOrder

pytestmark = pytest.mark.slow(3)

NOISE = noise(30, 20)
PICTURE = MediaFile(saved(NOISE))


@asynccontextmanager
async def preparing(kept: MediaCache | None = None, **limits: Any) -> AsyncIterator[Preparer]:
    helpers = Helpers()
    bounds = {name: limits.pop(name) for name in ("pixels", "embeddings") if name in limits}
    job = replace(MEDIA, **limits)
    try:
        yield Preparer(helpers, QWEN, kept or MediaCache(1 << 30), PreparingLimits(**bounds), job)
    finally:
        helpers.close()


async def refusal(preparer: Preparer, content: MediaFile) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await preparer.prepare(content)
    return refused.value


async def test_an_item_is_what_its_processor_makes_of_it() -> None:
    async with preparing() as preparer:
        item = await preparer.prepare(PICTURE)
        assert item.prepared == make_processor(QWEN).prepare(NOISE)
        again = MediaFile(base64.b64encode(saved(NOISE)), is_base64=True)
        assert (await preparer.prepare(again)).prepared == item.prepared
        broken = await refusal(preparer, MediaFile(b"YWJj", is_base64=True))
        assert (broken.status, broken.message[:24]) == (400, "A picture must be one of")
        strip = await refusal(preparer, MediaFile(saved(Image.new("RGB", (1, 100_000)))))
        assert "this one has 1 x 100000 pixels" in strip.message


def test_a_server_without_pictures_does_not_import_pillow() -> None:
    check = "import server.media.preparing, models.media.qwen_vl, sys; sys.exit('PIL' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


async def test_low_detail_fits_a_picture_into_a_square() -> None:
    content = MediaFile(saved(Image.new("RGB", (2048, 1024))))
    async with preparing() as preparer:
        high = await preparer.prepare(content)
        low = await preparer.prepare(content, PreparingOrder(low_detail=True))
    assert (high.prepared.shape, low.prepared.shape) == ((700, 1400, 3), (252, 504, 3))
    assert high.hash != low.hash


async def test_the_same_file_is_prepared_once() -> None:
    kept = MediaCache(1 << 30)
    async with preparing(kept, processes=2) as preparer:
        items = await asyncio.gather(*[preparer.prepare(PICTURE) for _ in range(4)])
        assert all(item is items[0] for item in items)
        assert await preparer.prepare(PICTURE) is items[0]
        assert [process.pid is None for process in preparer.queue.processes] == [False, True]
        assert (kept.queries, kept.hits) == (5, 1)


async def test_its_process_gives_way_to_all_others() -> None:
    async with preparing() as preparer:
        await preparer.prepare(PICTURE)
        pid = preparer.queue.processes[0].pid or 0
        assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (None, "Preparing a video took more than 1 s (--media-seconds)."),
        (-signal.SIGKILL, "A video cannot be decoded: the process that tried has ended."),
    ],
)
def test_an_item_at_which_the_process_ends_is_refused(code: int | None, why: str) -> None:
    error = MEDIA.explain(PreparingOrder(kind="video"), Ended(1.0, code))
    assert error is not None and (error.status, error.message) == (400, why)


async def test_a_picture_gets_only_so_much_memory() -> None:
    large = MediaFile(saved(Image.new("RGB", (8000, 8000)), compress_level=1))
    async with preparing(memory=100 << 20) as preparer:
        assert (await refusal(preparer, large)).message == "Decoding a picture took more memory than it may."
        await preparer.prepare(PICTURE)
    async with preparing(pixels=599) as preparer:
        assert "at most 599 pixels" in (await refusal(preparer, PICTURE)).message
    async with preparing(embeddings=5) as preparer:
        assert "5 tokens at most, and this one becomes 6" in (await refusal(preparer, PICTURE)).message


def test_items_are_kept_within_bytes_and_named_within_keys() -> None:
    prepared = make_processor(QWEN).prepare(NOISE)
    items = [KeptItem(bytes([n]), prepared) for n in range(4)]
    kept = MediaCache(3 * (prepared.pixels.nbytes + 1024))
    for item in items[:3]:
        kept.put(item)
        kept.name(f"n{item.hash[0]}", "key", "salt", item)
    assert kept.named("n0", "key", "salt") is items[0]  # used last, so it stays
    kept.put(items[3])
    assert [kept.get(item.hash) is not None for item in items] == [True, False, True, True]
    assert kept.named("n1", "key", "salt") is None
    assert (
        kept.named("n0", "key", "") is kept.named("n0", "", "salt") is kept.named("n0k", "ey", "salt") is None
    )
    assert kept.bytes == 3 * (prepared.pixels.nbytes + 1024)
    assert (
        kept.put(KeptItem(b"", msgspec.structs.replace(prepared, pixels=memoryview(bytes(10**7))))).hash
        == b""
    )
    assert kept.get(items[0].hash) is items[0]
    small = MediaCache(10)
    assert small.put(items[0]) is items[0] and small.get(items[0].hash) is None and small.bytes == 0
