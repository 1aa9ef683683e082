"""Recordings that another process reads: their features, what ends it, and that nothing of them is left."""

import asyncio
import gc
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from sounds import noise, written
from whole_recordings import log_mel

from models.media.whisper import PIECE_FRAMES, scaled
from server.errors import ApiError
from server.helpers.job_queue import Helpers
from server.media.audio.recordings import Recording, Recordings, TemporaryPath

pytestmark = pytest.mark.slow(3)

SOUND = noise(31.0)


@asynccontextmanager
async def reading(seconds: float = 7200.0) -> AsyncIterator[Recordings]:
    helpers = Helpers()
    try:
        yield Recordings(helpers, 80, seconds)
    finally:
        helpers.close()


@asynccontextmanager
async def opened(recordings: Recordings, file: bytes) -> AsyncIterator[Recording]:
    with TemporaryPath() as upload:
        upload.file.write(file)
        upload.file.flush()
        async with recordings.opened(upload, b"digest") as recording:
            yield recording


async def test_pieces_are_the_features_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    descriptors = len(os.listdir("/proc/self/fd"))
    async with reading() as recordings:
        async with opened(recordings, written(SOUND, "flac")) as recording:
            rows = np.concatenate(list(log_mel([(SOUND * 32767).astype(np.int16) / np.float32(32768)], 80)))
            assert (recording.frames, recording.seconds, len(recording.levels)) == (3100, 31.0, 3100)
            for first, frames in ((0, PIECE_FRAMES), (500, 1000), (3000, PIECE_FRAMES)):
                found = np.frombuffer(recording.piece(first, frames), np.float32).reshape(80, PIECE_FRAMES)
                assert np.abs(found - scaled(rows[first : first + frames], rows.max())).max() < 1e-5
            assert recordings.held == recording.size
        assert (recordings.held, os.listdir(tmp_path)) == (0, [])
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1


def test_a_file_that_nobody_enters_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that leaves while a thread makes it has its request cancelled before."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    TemporaryPath().file.close()
    gc.collect()
    assert os.listdir(tmp_path) == []


async def test_the_next_recording_is_read_after_one_that_cannot_be() -> None:
    async with reading(seconds=40.0) as recordings:
        for file in (b"no sound", written(noise(41.0))):
            with pytest.raises(ApiError) as refused:
                async with opened(recordings, file):
                    pass
            assert refused.value.status == 400
        leaving = asyncio.create_task(opened(recordings, written(SOUND)).__aenter__())
        await asyncio.sleep(0.01)
        leaving.cancel()
        async with opened(recordings, written(SOUND)) as recording:
            assert recording.seconds == 31.0
