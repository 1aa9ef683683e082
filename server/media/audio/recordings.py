"""The API process's side of recordings: files that are uploaded, and their features, which another process
makes and which lie in a file that has no name any more, so that they take no memory here."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec
import numpy as np

from models.media.whisper import FRAMES_PER_SECOND, PIECE_FRAMES, LogMel, scaled
from server.errors import BadRequest, Unavailable, refused_if_full
from server.media.failures import FULL_TEMPORARY
from server.offload.answering_process import AnsweringProcess, CannotStart, Ended
from server.offload.messages import ReceivedError, SentError, sent_error

MODULE = "server.media.audio.recording_process"
_SECONDS, _SECONDS_OF_EACH = 30.0, 1 / 30
"""The seconds in which a recording must be read, and how many more for each of the longest one's."""
_MOST_HELD = 2 << 30
"""Bytes of the features of all recordings together."""

_log = logging.getLogger(__name__)


class RecordingLimits(msgspec.Struct, frozen=True):
    """What a recording may take."""

    bytes: int = 100 << 20
    seconds: float = 7200.0
    processes: int = 1
    memory: int = 2 << 30
    """Bytes of address space beyond those that a process has when it waits."""


class RecordingSetup(msgspec.Struct, frozen=True):
    """What a process is started with."""

    socket: int
    bands: int
    limits: RecordingLimits
    log_level: str


class RecordingOrder(msgspec.Struct, frozen=True):
    """An order to read the recording in a file, and to write its features to another. Both paths are removed
    as soon as they are open."""

    source: str
    target: str


class Heard(msgspec.Struct, frozen=True, tag=True):
    """What was found in a recording."""

    samples: int
    """The samples at Whisper's rate."""
    frames: int
    """The rows of features: those of a whole piece for a shorter recording."""
    loudest: float
    """The greatest of all values of features."""
    levels: bytes
    """The mean of each row: float32."""


Answer = Heard | SentError


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

    def __enter__(self) -> TemporaryPath:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove_name()
        with suppress(OSError):  # a full disk refuses what is left in the buffer once more
            self.file.close()

    def remove_name(self) -> None:
        with suppress(OSError):
            os.unlink(self.path)


class Recording:
    """The features of a recording, of which pieces are read from a file. It is closed by who opened it."""

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

    def close(self) -> None:
        self._file.close()


class Recordings:
    """Reads recordings in processes that are started with the first ones. One that is late or dead is
    replaced, and its recording alone fails."""

    def __init__(self, bands: int, limits: RecordingLimits, log_level: str = "info") -> None:
        def setup(descriptor: int) -> bytes:
            return msgspec.msgpack.encode(RecordingSetup(descriptor, bands, limits, log_level))

        self.limits, self._bands = limits, bands
        self._seconds = _SECONDS + _SECONDS_OF_EACH * limits.seconds
        self._processes = [AnsweringProcess("recording", MODULE, setup) for _ in range(limits.processes)]
        self._idle: asyncio.LifoQueue[AnsweringProcess] = asyncio.LifoQueue()
        for process in self._processes:
            self._idle.put_nowait(process)
        self._under_way: set[asyncio.Task[Answer]] = set()
        self.held = 0
        """Bytes of the features that are held."""

    async def open(self, upload: TemporaryPath, digest: bytes) -> Recording:
        """The recording in a file that was written. Raises the error with which its request ends."""
        if self.held > _MOST_HELD:
            raise Unavailable(
                "The server holds as many long recordings as it can. Try again later.", retry_after=5
            )
        with refused_if_full(FULL_TEMPORARY):
            target = await asyncio.to_thread(TemporaryPath)
        try:
            heard = await self._read(RecordingOrder(upload.path, target.path))
        except BaseException:
            target.file.close()
            raise
        finally:
            target.remove_name()
        recording = Recording(heard, self._bands, target.file, digest)
        self.held += recording.size
        return recording

    def close_recording(self, recording: Recording) -> None:
        self.held -= recording.size
        recording.close()

    async def close(self) -> None:
        """Ends the processes, and what they do."""
        for task in list(self._under_way):
            task.cancel()
        for process in self._processes:
            await process.close()

    async def _read(self, order: RecordingOrder) -> Heard:
        process = await self._idle.get()
        task = asyncio.create_task(self._ask(process, order))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        found = await asyncio.shield(task)  # the process goes on, though this client leaves
        if isinstance(found, SentError):
            raise ReceivedError(found)
        return found

    async def _ask(self, process: AnsweringProcess, order: RecordingOrder) -> Answer:
        try:
            answer = await process.ask([msgspec.msgpack.encode(order)], self._seconds)
            return msgspec.msgpack.decode(answer, type=Answer)
        except CannotStart:
            reason = "The process that reads recordings cannot be started."
            return sent_error(Unavailable(reason, retry_after=5))
        except TimeoutError:
            _log.warning("reading a recording took more than %g s", self._seconds)
            reason = f"Reading the recording took more than {self._seconds:g} s."
            return sent_error(BadRequest(reason, "file"))
        except Ended as ended:
            _log.warning("reading a recording: %s", ended)
            reason = "The recording cannot be decoded: the process that tried has ended."
            return sent_error(BadRequest(reason, "file"))
        finally:
            self._idle.put_nowait(process)


def open_file(path: Path) -> BinaryIO:
    """Opens a file for the only reader that needs its name."""
    file = path.open("r+b")
    path.unlink()
    return file
