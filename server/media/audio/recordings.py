"""The API process's side of recordings: files that are uploaded, and their features, which a helper process
makes and which lie in a file that has no name any more, so that they take no memory here."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import tempfile
import weakref
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec
import numpy as np

from models.media.whisper import FRAMES_PER_SECOND, PIECE_FRAMES, LogMel, scaled
from server.errors import BadRequest, Unavailable, refused_if_full
from server.helpers.job import Ended, Job
from server.helpers.job_queue import Helpers
from server.media.failures import FULL_TEMPORARY

SECONDS_OF_EACH = 1 / 30
"""The seconds by which a recording must be read later for each of the longest one's."""
_MOST_HELD = 2 << 30
"""Bytes of the features of all recordings together."""


class RecordingSetup(msgspec.Struct, frozen=True):
    """The settings with which the job is opened."""

    bands: int
    seconds: float
    """The longest recording."""


class RecordingOrder(msgspec.Struct, frozen=True):
    """An order to read the recording in a file, and to write its features to another. Both paths are removed
    as soon as they are open."""

    source: str
    target: str


class Heard(msgspec.Struct, frozen=True, tag=True):
    """The length and the levels of a recording, as the helper found them."""

    samples: int
    """The samples at Whisper's rate."""
    frames: int
    """The rows of features: those of a whole piece for a shorter recording."""
    loudest: float
    """The greatest of all values of features."""
    levels: bytes
    """The mean of each row: float32."""


def _explain(_: RecordingOrder, ended: Ended) -> BadRequest:
    if ended.code is None:
        return BadRequest(f"Reading the recording took more than {ended.seconds:g} s.", "file")
    return BadRequest("The recording cannot be decoded: the process that tried has ended.", "file")


RECORDINGS: Job[Heard] = Job(
    name="recordings",
    module="server.media.audio.recording_job",
    answer=Heard,
    explain=_explain,
    memory=2 << 30,
    seconds=30.0,
)


def write_features(pieces: Iterable[np.ndarray], bands: int, target: BinaryIO) -> Heard:
    """Writes the rows of a recording, [frames, bands] in float32, to a file."""
    made, loudest, levels = LogMel(bands), -np.inf, list[np.ndarray]()

    def take(blocks: Iterable[np.ndarray]) -> None:
        nonlocal loudest
        for rows in blocks:
            target.write(np.ascontiguousarray(rows).data)
            loudest = max(loudest, float(rows.max()))
            levels.append(rows.mean(1))

    samples = 0
    for piece in pieces:
        samples += len(piece)
        take(made.push(piece))
    take(made.flush())
    target.flush()
    return Heard(samples, made.frames, loudest, np.concatenate(levels).astype(np.float32).tobytes())


class TemporaryPath:
    """A file that ends with this object, if nobody has removed its name before."""

    def __init__(self) -> None:
        """Raises OSError if there is no room for it."""
        try:
            descriptor, self.path = tempfile.mkstemp(prefix="facet-audio-")
        except FileNotFoundError as error:  # Python has looked for a folder, and could write to none
            raise OSError(errno.ENOSPC, "no folder for temporary files can be written") from error
        self.file = os.fdopen(descriptor, "w+b")
        # By itself, too, for a task that is cancelled while a thread makes this does not enter it.
        self._remove = weakref.finalize(self, _remove, self.path)

    def __enter__(self) -> TemporaryPath:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()
        with suppress(OSError):  # a full disk refuses what is left in the buffer once more
            self.file.close()


def _remove(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)


class Recording:
    """The features of a recording, of which pieces are read from a file that its maker closes."""

    def __init__(self, heard: Heard, bands: int, file: BinaryIO, digest: bytes) -> None:
        self.heard, self.bands, self._file = heard, bands, file
        self._digest = digest

    @property
    def seconds(self) -> float:
        return self.heard.samples / 16_000

    @property
    def frames(self) -> int:
        """The frames that are no silence behind the end."""
        return max(1, min(self.heard.frames, -(-self.heard.samples // (16_000 // FRAMES_PER_SECOND))))

    @property
    def size(self) -> int:
        return self.heard.frames * self.bands * 4

    @property
    def levels(self) -> np.ndarray:
        return np.frombuffer(self.heard.levels, np.float32)

    def piece(self, first: int, frames: int = PIECE_FRAMES) -> bytes:
        """The features [bands, PIECE_FRAMES], float32, of so many frames from the first one on. Behind the
        end of a short recording there is silence, and behind others nothing."""
        end = first + frames if first + frames < self.frames else self.heard.frames
        count = max(0, min(PIECE_FRAMES, end - first))
        row = self.bands * 4
        data = os.pread(self._file.fileno(), count * row, first * row)
        rows = np.frombuffer(data, np.float32).reshape(-1, self.bands)
        return scaled(rows, self.heard.loudest).tobytes()

    def hash_of(self, first: int, frames: int = PIECE_FRAMES) -> bytes:
        """The hash of a piece, by which every floor knows it."""
        return hashlib.blake2b(msgspec.msgpack.encode((self._digest, first, frames)), digest_size=32).digest()


class Recordings:
    """Has recordings read, and counts the bytes of those that are open."""

    def __init__(
        self, helpers: Helpers, bands: int, most_seconds: float, job: Job[Heard] = RECORDINGS
    ) -> None:
        """`most_seconds`: the longest recording."""
        job = replace(job, seconds=job.seconds + SECONDS_OF_EACH * most_seconds)
        self._bands, self._queue = bands, helpers.open(job, lambda: RecordingSetup(bands, most_seconds))
        self.held = 0
        """Bytes of the features that are held."""

    @asynccontextmanager
    async def opened(
        self, upload: TemporaryPath, digest: bytes, owner: str = ""
    ) -> AsyncGenerator[Recording]:
        """The recording in a file that was written. Raises the error with which its request ends."""
        if self.held > _MOST_HELD:
            raise Unavailable(
                "The server holds as many long recordings as it can. Try again later.", retry_after=5
            )
        with refused_if_full(FULL_TEMPORARY):
            target = await asyncio.to_thread(TemporaryPath)
        with target:
            heard = await self._queue.ask(RecordingOrder(upload.path, target.path), owner=owner)
            recording = Recording(heard, self._bands, target.file, digest)
            self.held += recording.size
            try:
                yield recording
            finally:
                self.held -= recording.size


def open_file(path: Path) -> BinaryIO:
    """Opens a file for the only reader that needs its name."""
    file = path.open("r+b")
    path.unlink()
    return file
