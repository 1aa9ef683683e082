"""What a frontend makes of anybody's requests, and tasks that read it up to their first wait."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from engine_core.protocol import Pooled
from server.access.admission import Admission
from server.access.client_identity import ANYONE
from server.frontend.frontend import Frontend
from server.frontend.text_output import Delta
from server.requests.sampling_params import SamplingParams


def generate(
    frontend: Frontend,
    prompt: list[int],
    sampling: SamplingParams,
    *,
    admission: Admission | None = None,
    request_id: str = "",
    **options: Any,
) -> AsyncGenerator[Delta, None]:
    frontend.require_ready()
    own = admission or frontend.admissions.admit(ANYONE, sampling.n)
    if request_id:
        own.set_id(request_id)
    try:
        return frontend.engine_requests.generate(prompt, sampling, own, **options)
    except BaseException:
        own.release()
        raise


async def started(stream: AsyncGenerator[Delta, None]) -> asyncio.Task[list[Delta]]:
    """Starts to read the stream in a task, and lets it run to its first wait."""

    async def read() -> list[Delta]:
        return [delta async for delta in stream]

    task = asyncio.create_task(read())
    for _ in range(5):
        await asyncio.sleep(0)
    return task


async def beginning(work: Coroutine[Any, Any, list[Pooled]]) -> asyncio.Task[list[Pooled]]:
    task = asyncio.create_task(work)
    for _ in range(5):
        await asyncio.sleep(0)
    return task
