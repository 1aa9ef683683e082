"""Makes items of the media parts of requests: reads files from where they are, and has them prepared."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Literal

from models.media.files import MediaFiles, with_settings
from models.media.item import AudioProcessor, Processor, VideoProcessor
from models.media.registry import find_media, make_processor
from models.plain_files import ConfigError
from server.errors import ApiError, BadRequest, Unprocessable
from server.helpers.job_queue import Helpers
from server.media.fetch import Fetcher, host_name
from server.media.inline_files import InlineFiles
from server.media.media_cache import KeptItem, MediaCache
from server.media.media_parts import MediaFile, MediaPart
from server.media.media_sources import Sources
from server.media.preparing import MEDIA, Preparer, PreparingLimits, PreparingOrder, processes_for
from server.media.prompt import Laid, MediaNeeded
from server.metrics.optional_metrics import MediaMetrics
from server.metrics.server_metrics import Metrics
from server.model_facts import MediaFacts
from server.options.media_options import SERVED_KINDS, MediaIo, MediaOptions, read_media_io
from server.options.server_flags import ServerConfig
from server.text.tokenizer import Tokenizer
from worker.worker_facts import WorkerFacts

_log = logging.getLogger(__name__)

_WAITING = 8
"""How many requests of the most bytes may wait until their media are prepared."""


def open_reader(
    config: ServerConfig,
    folder: Path,
    tokenizer: Tokenizer,
    metrics: Metrics,
    worker: WorkerFacts,
    helpers: Helpers,
) -> MediaReader | None:
    """The reader for a checkpoint's media; None if it has none, or the operator allows none. Raises
    ConfigError if a file of the checkpoint cannot be used."""
    files = find_media(folder) if config.media.takes_any else None
    if files is None:
        return None
    kept_bytes = int(config.engine.mm_processor_cache_gb * (1 << 30))
    most, width = worker.most_embeddings, worker.media_width
    given = files, config.media, kept_bytes, tokenizer, metrics.of_media(), helpers
    return MediaReader(*given, most_embeddings=most, width=width)


def media_facts(
    files: MediaFiles, options: MediaOptions, tokenizer: Tokenizer, most: dict[str, int]
) -> tuple[Processor, MediaFacts]:
    """The processor of a checkpoint with the operator's settings, and what of it is known where prompts are
    written. `most`: the most items of each kind in a prompt."""
    settings, embeds = options.mm_processor_kwargs, options.enable_mm_embeds
    _check_names(settings, files)
    processor = make_processor(with_settings(files, settings))
    alone, most = _is_alone(processor, files), _most_taken(processor, files, most)
    video = processor if isinstance(processor, VideoProcessor) and "video" in most else None
    words = (video.video_placeholder, video.video_written) if video else ("", "")
    kind = _kind_of(processor)
    reserved = _reserved(processor, words, tokenizer)
    placeholders = processor.placeholder, processor.written
    embeds = embeds and kind == "image"
    transcribes = getattr(processor, "transcribes", "")
    facts = MediaFacts(*placeholders, reserved, alone, most, *words, embeds, transcribes, kind)
    return processor, facts


def _kind_of(processor: Processor) -> Literal["image", "audio"]:
    return "audio" if isinstance(processor, AudioProcessor) else "image"


def _is_alone(processor: Processor, files: MediaFiles) -> bool:
    return not processor.placeholder or files.architecture.endswith("ForRetrieval")


def _most_taken(processor: Processor, files: MediaFiles, most: dict[str, int]) -> dict[str, int]:
    """The most items of those kinds that a model takes."""
    films = isinstance(processor, VideoProcessor) and not _is_alone(processor, files)
    taken = (_kind_of(processor), "video") if films else (_kind_of(processor),)
    return {kind: count for kind, count in most.items() if kind in taken}


def find_taken(options: MediaOptions, folder: Path) -> tuple[dict[str, int], int] | None:
    """What the files of a checkpoint say of its media before a load: the most items of each kind in a prompt,
    and the most bytes of all. None if it takes none, or the operator allows none."""
    files = find_media(folder) if options.takes_any else None
    if files is None:
        return None
    files = with_settings(files, options.mm_processor_kwargs)
    most = _most_taken(make_processor(files), files, options.most_of(SERVED_KINDS))
    return most, options.max_media_mb << 20


class MediaReader:
    """Reads the media of requests in an API process whose model takes some."""

    def __init__(
        self,
        files: MediaFiles,
        options: MediaOptions,
        kept_bytes: int,
        tokenizer: Tokenizer,
        metrics: MediaMetrics,
        helpers: Helpers,
        *,
        most_embeddings: int = PreparingLimits().embeddings,
        width: int = 0,
    ) -> None:
        """`most_embeddings`: the most that the engine takes of an item. `width`: the numbers of each."""
        most = options.most_of(SERVED_KINDS)
        self._processor, self.facts = media_facts(files, options, tokenizer, most)
        self._files = files = with_settings(files, options.mm_processor_kwargs)
        self._io, self._tokenizer, self.metrics = options.media_io_kwargs, tokenizer, metrics
        self.most_bytes = options.max_media_mb << 20
        """The most bytes of all files of a request."""
        self.kept = MediaCache(kept_bytes)
        seconds, frames = options.media_seconds, options.most_frames or PreparingLimits().frames
        limits = PreparingLimits(
            embeddings=most_embeddings, frames=frames, width=width, sound_seconds=options.max_audio_seconds
        )
        job = replace(
            MEDIA,
            seconds=seconds,
            processes=processes_for(options),
            waiting_bytes=max(MEDIA.waiting_bytes, _WAITING * self.most_bytes),
        )
        self._preparer = Preparer(helpers, files, self.kept, limits, job)
        domains = frozenset(map(host_name, options.allowed_media_domains)) or None
        folder = Path(options.allowed_local_media_path) if options.allowed_local_media_path else None
        self._sources = Sources(Fetcher(domains, self.most_bytes, seconds), folder, self.most_bytes)

    async def prepare(
        self, needed: MediaNeeded, inline: InlineFiles, key: str, owner: str = ""
    ) -> dict[MediaPart, KeptItem]:
        """The items that a request of this owner needs, all prepared at once; those of tools that cannot be
        read are missing. Raises the error with which the request ends. `key` names the API key within which
        names of items are known."""
        if needed.settings:
            self._check_settings(needed.settings)
        io, names, taken = self._read_io(needed.io), (key, needed.salt), 0

        async def item(part: MediaPart) -> KeptItem | None:
            try:
                return await read(part)
            except ApiError as error:
                if part not in needed.of_tools or error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                    raise
                _log.info("a file in a tool's result is left out, as it cannot be read: %s", error)
                return None

        async def read(part: MediaPart) -> KeptItem:
            nonlocal taken
            if part.url is None:
                return self._named(part, *names)
            content = inline.take(part.url)
            if content is None and part.grid is not None:
                content = MediaFile(part.url.encode("utf-8", "replace"), is_base64=True)
            content = content or await self.read(part.url)
            self._check_bytes(size := taken + len(content.data))
            taken = size
            made = await self._make(content, part, needed.settings, io, owner)
            if part.uuid is not None:
                self.kept.name(part.uuid, *names, made)
            return made

        parts = list(dict.fromkeys(needed.parts))
        tasks = [asyncio.create_task(item(part)) for part in parts]
        try:
            found = zip(parts, await asyncio.gather(*tasks), strict=True)
            return {part: item for part, item in found if item is not None}
        finally:
            for task in tasks:
                task.cancel()
            self.metrics.count_lookups(self.kept.queries, self.kept.hits)

    def _check_settings(self, settings: Mapping[str, object]) -> None:
        """Refuses settings of a request that the model's processor does not take."""
        try:
            _check_names(settings, self._files)
            make_processor(with_settings(self._files, settings))
        except ConfigError as error:
            raise BadRequest(f"mm_processor_kwargs: {error}", "mm_processor_kwargs") from None

    def _read_io(self, given: Mapping[str, object]) -> MediaIo:
        """How files of a request are read, which may say so itself."""
        try:
            return read_media_io(self._io, given)
        except ValueError as error:
            raise BadRequest(f"media_io_kwargs: {error}", "media_io_kwargs") from None

    def lay(self, items: Mapping[MediaPart, KeptItem]) -> dict[MediaPart, Laid]:
        """The items as those need them who write the prompt."""
        return {part: laid(item, self._processor, self._tokenizer) for part, item in items.items()}

    def _named(self, part: MediaPart, key: str, salt: str) -> KeptItem:
        uuid = part.uuid or ""
        item = self.kept.named(uuid, key, salt)
        if item is None or (item.prepared.kind == "video") != (part.kind == "video"):
            self.metrics.refuse("name")
            raise Unprocessable(f"No media item is kept under the uuid {uuid[:64]!r}: send its content too.")
        return item

    def _check_bytes(self, taken: int) -> None:
        if taken > self.most_bytes:
            self.metrics.refuse("size")
            raise BadRequest(
                f"The media of a request may have at most {self.most_bytes} bytes together. The operator "
                "sets this with --max-media-mb.",
                "messages",
            )

    async def read(self, url: str) -> MediaFile:
        with self.metrics.timed("read"):
            return await self._sources.read(url)

    async def _make(
        self, content: MediaFile, part: MediaPart, settings: Mapping[str, object], io: MediaIo, owner: str
    ) -> KeptItem:
        if part.kind == "video":
            settings = {**io.video_settings, **settings}
        with self.metrics.timed("prepare"):
            background, own = io.image.rgba_background_color, dict(settings)
            asked = PreparingOrder(False, part.kind, part.low_detail, own, background, part.grid)
            return await self._preparer.prepare(content, asked, owner=owner)


def laid(item: KeptItem, processor: Processor, tokenizer: Tokenizer) -> Laid:
    """The item as those need it who write the prompt."""
    layout = processor.layout(item.prepared)
    spelled = layout.spelled(lambda text: tokenizer.encode(text, False)) if layout.texts else layout
    return Laid(item.hash, spelled)


def _reserved(processor: Processor, videos: tuple[str, str], tokenizer: Tokenizer) -> tuple[str, ...]:
    """What would be no text if users could write it: the placeholders, and the tokens that go with them.
    `videos`: what stands for one in rendered templates, and in messages."""
    words = [word for word in (processor.placeholder, videos[0]) if word]
    written = processor.written + videos[1]
    tokens = [token for token in tokenizer.added_tokens if token in written]
    return tuple(dict.fromkeys([*words, *tokens])) if words else ()


def _check_names(settings: Mapping[str, object], files: MediaFiles) -> None:
    processor = make_processor(files)
    known = processor.settings.__struct_fields__
    if isinstance(processor, VideoProcessor):
        known += processor.video_settings.__struct_fields__
    if unknown := [name for name in settings if name not in known]:
        raise ConfigError(
            f"the processor has no setting {unknown[0][:64]!r}, but {', '.join(sorted(set(known)))}"
        )
