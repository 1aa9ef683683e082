"""The API process's side of preparing media: finds what is kept, and has other processes make what is new.
Pillow is imported there alone."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from functools import partial
from typing import Any

import msgspec

from models.media.files import MediaFiles
from models.media.item import Kind, Prepared
from server.errors import BadRequest, Overloaded, Unavailable
from server.media.kept_items import Item, KeptItems
from server.media.parts import MediaFile
from server.offload.answering_process import AnsweringProcess, CannotStart, Ended
from server.offload.messages import ReceivedError, SentError, sent_error
from server.options.media_io import ALL_FRAMES, WHITE, Color

MODULE = "server.media.preparing_process"
NAMES: dict[Kind, str] = {"image": "picture", "video": "video", "audio": "sound"}

_log = logging.getLogger(__name__)


class PreparingLimits(msgspec.Struct, frozen=True):
    """What preparing one item may take."""

    processes: int = 1
    seconds: float = 30.0
    """Seconds after which the process of an item is killed."""
    memory: int = 3 << 30
    """Bytes of address space beyond those that a process has when it waits."""
    pixels: int = 178_956_970
    embeddings: int = 1 << 30
    """The most embeddings that the engine takes of an item."""
    width: int = 0
    """The numbers of an embedding."""
    sound_seconds: float = 7200.0
    """The longest sound."""
    frames: int = ALL_FRAMES
    """The most frames that are taken of a video."""
    waiting_bytes: int = 512 << 20
    """Bytes of all items together that are being prepared or wait for it."""


class PreparingSetup(msgspec.Struct, frozen=True):
    """What a process is started with."""

    socket: int
    """The inherited descriptor of its end of the connection."""
    files: MediaFiles
    limits: PreparingLimits
    log_level: str


class PreparingOrder(msgspec.Struct, frozen=True):
    """An order to prepare the item whose bytes follow in a frame of their own."""

    is_base64: bool = False
    kind: Kind = "image"
    low_detail: bool = False
    settings: dict[str, Any] = {}
    """Settings of the request to put over those of the checkpoint."""
    background: Color = WHITE
    grid: str | None = None
    """The grid of a picture that is embeddings, as `MediaPart` has it; None for other items."""


_USUAL = PreparingOrder()
Answer = Prepared | SentError


class Preparer:
    """Prepares media items in processes that are started with the first items. One that is late or dead is
    replaced, and its item alone fails."""

    def __init__(
        self, files: MediaFiles, kept: KeptItems, limits: PreparingLimits, log_level: str = "info"
    ) -> None:
        def setup(descriptor: int) -> bytes:
            return msgspec.msgpack.encode(PreparingSetup(descriptor, files, limits, log_level))

        self._kept, self._limits = kept, limits
        self._salt = hashlib.blake2b(msgspec.msgpack.encode(files)).digest()
        """A digest of everything that decides what becomes of the same bytes."""
        self._processes = [AnsweringProcess("preparing", MODULE, setup) for _ in range(limits.processes)]
        self._idle: asyncio.LifoQueue[AnsweringProcess] = asyncio.LifoQueue()
        """The processes without an item; the last one used comes first, so that few of them are started."""
        for process in self._processes:
            self._idle.put_nowait(process)
        self._under_way: dict[bytes, asyncio.Task[Answer]] = {}
        self._bytes = 0

    async def prepare(self, content: MediaFile, asked: PreparingOrder = _USUAL) -> Item:
        """The item that a file becomes. Raises the error with which its request ends."""
        asked = msgspec.structs.replace(asked, is_base64=content.is_base64)
        order = msgspec.msgpack.encode(asked, order="sorted")
        digest = await asyncio.to_thread(self._digest, order, content)
        if (kept := self._kept.get(digest)) is not None:
            return kept
        task = self._under_way.get(digest)
        if task is None:
            size = len(content.data)
            if self._bytes and self._bytes + size > self._limits.waiting_bytes:
                raise Overloaded(
                    "The server is preparing as many media as it can. Try again later.", retry_after=1
                )
            self._bytes += size
            task = self._under_way[digest] = asyncio.create_task(
                self._make(order, content, NAMES[asked.kind])
            )
            task.add_done_callback(partial(self._forget, digest, size))
        answer = await asyncio.shield(task)  # others may wait for the same, though this client leaves
        if isinstance(answer, SentError):
            raise ReceivedError(answer)
        pixels = answer.pixels.cast("B")  # msgspec 0.19 says that a view is as long as its frame
        return self._kept.put(Item(digest, msgspec.structs.replace(answer, pixels=pixels)))

    async def close(self) -> None:
        """Ends the processes, and what they do."""
        for task in list(self._under_way.values()):
            task.cancel()
        for process in self._processes:
            await process.close()

    def _digest(self, order: bytes, content: MediaFile) -> bytes:
        digest = hashlib.blake2b(order, digest_size=32, key=self._salt)
        digest.update(content.data)
        return digest.digest()

    def _forget(self, digest: bytes, size: int, _: asyncio.Task[Answer]) -> None:
        del self._under_way[digest]
        self._bytes -= size

    async def _make(self, order: bytes, content: MediaFile, name: str) -> Answer:
        process = await self._idle.get()
        try:
            answer = await process.ask([order, content.data], self._limits.seconds)
            return msgspec.msgpack.decode(answer, type=Answer)
        except CannotStart:
            return sent_error(
                Unavailable("The process that prepares media cannot be started.", retry_after=5)
            )
        except TimeoutError:
            _log.warning("preparing an item took more than %g s", self._limits.seconds)
            return sent_error(
                BadRequest(f"Preparing a {name} took more than {self._limits.seconds:g} s (--media-seconds).")
            )
        except Ended as ended:
            _log.warning("preparing an item: %s", ended)
            return sent_error(BadRequest(f"A {name} cannot be decoded: the process that tried has ended."))
        finally:
            self._idle.put_nowait(process)
