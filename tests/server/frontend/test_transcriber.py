"""A piece of a recording that an engine reads, against a scripted one."""

import asyncio
from typing import Any

import numpy as np
from fake_client import FakeClient
from fake_frontend import FakeFrontend
from speech_frontend import KNOWN

from engine_core.client.in_flight import AddOptions
from server.access.client_identity import ANYONE
from server.frontend.transcriber import PieceEngine
from server.speech.speech_model import Draw, Drawn, Piece
from worker.protocol import TokenLogprobs


class _Recording:
    def piece(self, first: int, frames: int) -> np.ndarray:
        return np.zeros((1, 4), np.float32)

    def hash_of(self, first: int, frames: int) -> bytes:
        return b"hash"


async def test_a_piece_waits_until_its_first_token_and_is_counted_once() -> None:
    client, frontend = FakeClient(), FakeFrontend()
    admissions = frontend.admissions
    admission = admissions.admit(ANYONE, 1)
    known: Any = (KNOWN, _Recording(), frontend.facts, frontend.tokenizer)
    engine = PieceEngine(client, admission, lambda: 1, *known, frontend.metrics, AddOptions)  # pyright: ignore
    found: list[Drawn] = []

    async def read() -> None:
        async for drawn in engine.draw([1, 2, 3], Draw(max_tokens=8), Piece(0, 4)):
            found.extend(drawn)

    task = asyncio.create_task(read())
    async with asyncio.timeout(60):
        while not client.submitted:
            await asyncio.sleep(0.001)
        assert admissions.waiting_tokens == 3
        for number, finish in enumerate((None, None, "stop"), 1):
            logprobs = [TokenLogprobs([number], [-0.5], 1)]
            client.submitted[0].say([number], logprobs=logprobs, finish=finish)
            while len(found) < number:
                await asyncio.sleep(0)
            assert admissions.waiting_tokens == 0
        await task
    assert [one.token for one in found] == [1, 2, 3] and admission.owner.answers == 0.0
