"""The API process's side of preparing media: finds what is kept, and has helper processes make what is new.
Pillow is imported there alone."""

from __future__ import annotations

import asyncio
import hashlib
import os
from typing import Any

import msgspec

from models.media.files import MediaFiles
from models.media.item import Kind, Prepared
from server.errors import BadRequest
from server.helpers.job import Ended, Job
from server.helpers.job_queue import Helpers
from server.media.media_cache import KeptItem, MediaCache
from server.media.media_parts import MediaFile
from server.options.media_options import ALL_FRAMES, WHITE, Color, MediaOptions

NAMES: dict[Kind, str] = {"image": "picture", "video": "video", "audio": "sound"}


class PreparingLimits(msgspec.Struct, frozen=True):
    """The limits of an item."""

    pixels: int = 178_956_970
    embeddings: int = 1 << 30
    """The most embeddings that the engine takes of an item."""
    width: int = 0
    """The numbers of an embedding."""
    sound_seconds: float = 7200.0
    """The longest sound."""
    frames: int = ALL_FRAMES
    """The most frames that are taken of a video."""


class PreparingSetup(msgspec.Struct, frozen=True):
    """The settings with which the job is opened."""

    files: MediaFiles
    limits: PreparingLimits


class PreparingOrder(msgspec.Struct, frozen=True):
    """An order to prepare an item of some bytes."""

    is_base64: bool = False
    kind: Kind = "image"
    low_detail: bool = False
    settings: dict[str, Any] = {}
    """Settings of the request to put over those of the checkpoint."""
    background: Color = WHITE
    grid: str | None = None
    """The grid of a picture that is embeddings, as `MediaPart` has it; None for other items."""


def _explain(asked: PreparingOrder, ended: Ended) -> BadRequest:
    name = NAMES[asked.kind]
    if ended.code is None:
        return BadRequest(f"Preparing a {name} took more than {ended.seconds:g} s (--media-seconds).")
    return BadRequest(f"A {name} cannot be decoded: the process that tried has ended.")


MEDIA: Job[Prepared] = Job(
    name="media",
    module="server.media.preparing_job",
    answer=Prepared,
    explain=_explain,
    memory=3 << 30,
    seconds=30.0,
)
_MOST_PROCESSES = 4
_USUAL = PreparingOrder()


def processes_for(options: MediaOptions) -> int:
    """The processes that read media at the same time: as the operator says, or half as many as processors."""
    return options.mm_processor_workers or max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) // 2))


class Preparer:
    """Has media items prepared, each of them once as long as it is kept."""

    def __init__(
        self,
        helpers: Helpers,
        files: MediaFiles,
        kept: MediaCache,
        limits: PreparingLimits = PreparingLimits(),
        job: Job[Prepared] = MEDIA,
    ) -> None:
        self._kept = kept
        self._salt = hashlib.blake2b(msgspec.msgpack.encode(files)).digest()
        """A digest of everything that decides what becomes of the same bytes."""
        self.queue = helpers.open(job, lambda: PreparingSetup(files, limits))

    async def prepare(
        self, content: MediaFile, asked: PreparingOrder = _USUAL, *, owner: str = ""
    ) -> KeptItem:
        """The item that a file becomes. Raises the error with which its request ends."""
        asked = msgspec.structs.replace(asked, is_base64=content.is_base64)
        digest = await asyncio.to_thread(self._digest, asked, content)
        if (kept := self._kept.get(digest)) is not None:
            return kept
        made = await self.queue.ask(asked, content.data, owner=owner, digest=digest)
        pixels = made.pixels.cast("B")  # msgspec 0.19 says that a view is as long as its frame
        return self._kept.put(KeptItem(digest, msgspec.structs.replace(made, pixels=pixels)))

    def _digest(self, asked: PreparingOrder, content: MediaFile) -> bytes:
        order = msgspec.msgpack.encode(asked, order="sorted")
        digest = hashlib.blake2b(order, digest_size=32, key=self._salt)
        digest.update(content.data)
        return digest.digest()
