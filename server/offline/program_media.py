"""Media that a program hands over, prepared in its own process, and prompts of embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from engine_core.prompt_media import Media
from models.media.files import with_settings
from models.media.item import AudioProcessor, Kind, MediaError, Prepared, Video, VideoProcessor
from models.media.registry import find_media, make_processor
from server.errors import BadRequest
from server.media.kept_items import Item
from server.media.parts import MEDIA_PARTS, MediaPart, check_embeds, read_part
from server.media.preparing import NAMES, PreparingLimits
from server.media.prompt import (
    LaidMedia,
    Written,
    as_media,
    cut_prompt,
    encode_written,
    find_places,
    quoted_words,
)
from server.media.reader import laid, media_facts
from server.media.rows import check_rows, cut_rows, digest, row_width
from server.model_facts import Facts
from server.offline.program_sounds import SOUND_FORMS, each_sound, prepare_sound
from server.options.media_io import read_media_io
from server.options.server_config import ServerConfig
from server.reading.pooled_conversations import item_with_media, read_media_pairs
from server.reading.prompts import ReadingContext, ReadingOptions
from server.requests import pooling
from server.requests.sampling import SamplingParams
from server.requests.scoring import Compared, Pairs, ScoreOptions, Side
from server.text.tokenizer import Tokenizer
from worker.protocol import Pooling

_FORMS = "a picture is one of Pillow, the path of a file, a file's bytes, or its embeddings"
_EMBEDS, _GRID = "image_embeds", "image_grid_thw"
_OWN_PARTS: dict[str, Kind] = {
    "image": "image",
    "image_pil": "image",
    _EMBEDS: "image",
    "video": "video",
    "audio": "audio",
}
"""The kinds of parts whose item stands under the same name, beside those of the API."""
_VIDEO_FORMS = (
    "a video is the path of a file, a file's bytes, or its frames: an array [frames, height, width, 3]"
)

PreparedItems = Mapping[bytes, Item]
"""The media of a call by their hashes."""


@dataclass(frozen=True)
class ProgramItem:
    """A video or a sound among the pictures of a prompt."""

    kind: Kind
    given: object


class ComparedSide(msgspec.Struct, frozen=True):
    """A text to compare, or what has pictures: then it has parts."""

    text: str
    parts: list[dict[str, Any]] = []
    """The parts of a content; those that are no text stand for the pictures, in order."""
    pictures: Sequence[object] = []


class Encoded(msgspec.Struct, frozen=True):
    """A prompt as an engine gets it."""

    text: str | None
    ids: list[int]
    media: tuple[Media, ...] = ()

    @property
    def shown_ids(self) -> list[int]:
        """The ids that outputs show: none, if the prompt is embeddings."""
        return [] if self.media and self.media[0].kind == "rows" else self.ids


class ProgramMedia:
    """Prepares media for one model. Raises BadRequest for what it does not take."""

    def __init__(self, folder: Path, facts: Facts, tokenizer: Tokenizer, config: ServerConfig) -> None:
        files = find_media(folder) if facts.ready.worker.most_embeddings else None
        if files is None:
            raise BadRequest("This model takes no pictures, only text.", "multi_modal_data")
        most: dict[str, int] = dict.fromkeys(("image", "video", "audio"), facts.max_model_len)
        self._processor, self.facts = media_facts(files, config.media, tokenizer, most)
        self._tokenizer, self._width = tokenizer, facts.ready.worker.media_width
        io, options = read_media_io(config.media.media_io_kwargs), config.media
        self._background = io.image.rgba_background_color
        settings = {**io.video_settings, **options.mm_processor_kwargs}
        self._videos = make_processor(with_settings(files, settings))
        self._most_seconds = options.max_audio_seconds
        self._limits = options.most_frames or PreparingLimits().frames, facts.ready.worker.most_embeddings
        facts = msgspec.structs.replace(facts, media=self.facts)
        self._context = ReadingContext(facts, tokenizer, ReadingOptions.of(config))

    def encode(
        self,
        text: str,
        pictures: Sequence[object],
        params: SamplingParams,
        *,
        add_special_tokens: bool = True,
    ) -> Encoded:
        """Encodes a text that has the family's placeholder for each picture, in order. Where prompts begin
        with pictures (PaliGemma), the text has the token that begins it behind them."""
        parts, media, items = self._prepare_all(pictures)
        written, facts = self._with_places(text, parts), self._context.facts
        behind = text.rpartition(self.facts.placeholder)[2] if self.facts.placeholder else text
        ids, placed = encode_written(
            *(written, media, self.facts, self._tokenizer, facts.vocab_size),
            add_special_tokens=add_special_tokens and not self._tokenizer.chat.begins(behind),
        )
        keep = len(params.cut_prompt(ids, facts))
        if keep < len(ids):
            ids, placed = cut_prompt(ids, placed, keep, left=True)
        return Encoded(written.plain_text, ids, as_media(placed, items))

    def read_item(
        self, text: str, pictures: Sequence[object], reader: pooling.TextReader, params: Pooling, index: int
    ) -> tuple[pooling.Item, PreparedItems]:
        """Reads such a text to pool it. `index` is that of the prompt in its call."""
        parts, media, items = self._prepare_all(pictures)
        context = replace(self._context, media=media)
        return item_with_media(self._with_places(text, parts), context, reader, params, index), items

    def read_pairs(
        self, queries: Sequence[ComparedSide], documents: Sequence[ComparedSide], options: ScoreOptions
    ) -> tuple[Compared, PreparedItems]:
        """Reads what is compared, texts too, in the form that its pictures need."""
        pictures = [one for side in (*queries, *documents) for one in side.pictures]
        parts, media, items = self._prepare_all(pictures)
        left = iter(parts)

        def read(side: ComparedSide) -> Side:
            if not side.parts:
                return side.text
            return [
                part if part["type"] == "text" else {**part, part["type"]: next(left).url or ""}
                for part in side.parts
            ]

        pairs = Pairs([read(side) for side in queries], [read(side) for side in documents])
        return read_media_pairs(pairs, options, replace(self._context, media=media), ""), items

    def quoted_words(self) -> Set[str]:
        """Returns what reads like a placeholder, though it is text in messages."""
        return quoted_words(self.facts, {}, self._tokenizer)

    def _with_places(self, text: str, parts: list[MediaPart]) -> Written:
        """The text of a prompt, which has to have a place for each picture and video."""
        placeholder = self.facts.placeholder
        if not placeholder and (text or len(parts) > 1):
            raise BadRequest(
                "This model has a vector for a text or for a picture: give one of both.", "prompts"
            )
        if not placeholder:
            return Written(text, parts, is_plain=False)
        places = find_places(text, self.facts)
        kinds: tuple[tuple[Kind, str], ...] = (
            (self.facts.kind, placeholder),
            ("video", self.facts.video_placeholder),
        )
        for kind, word in kinds:
            given = sum(part.kind == kind for part in parts)
            if given != places.count(kind):
                raise BadRequest(
                    f"The prompt has {given} {NAMES[kind]}s, and {places.count(kind)} places for them, "
                    f"{word!r} each: write one for each of them.",
                    "prompts",
                )
        by_kind = {kind: iter([part for part in parts if part.kind == kind]) for kind in set(places)}
        return Written(text, [next(by_kind[kind]) for kind in places], is_plain=False)

    def _prepare_all(self, pictures: Sequence[object]) -> tuple[list[MediaPart], LaidMedia, PreparedItems]:
        """Prepares pictures; returns the part that stands for each in a content, and what these name."""
        items = [self._prepare(picture) for picture in pictures]
        parts = [
            MediaPart(picture.kind if isinstance(picture, ProgramItem) else "image", item.hash.hex())
            for picture, item in zip(pictures, items, strict=True)
        ]
        processor, tokenizer = self._processor, self._tokenizer
        by_part = {part: laid(item, processor, tokenizer) for part, item in zip(parts, items, strict=True)}
        return parts, by_part, {item.hash: item for item in items}

    def _prepare(self, given: object) -> Item:
        try:
            if isinstance(given, ProgramItem):
                prepared = self._beside(given)
            elif isinstance(self._processor, AudioProcessor):
                raise BadRequest("This model hears sounds, and sees no pictures.", "multi_modal_data")
            else:
                prepared = self._encoded(given) if _is_encoded(given) else self._resized(given)
        except MediaError as error:
            raise BadRequest(str(error), "multi_modal_data") from None
        return Item(digest((prepared.shape, prepared.grid), prepared.pixels), prepared)

    def _encoded(self, given: Any) -> Prepared:
        """The item of embeddings, or of an object with them and their grid."""
        from server.media.encoded import encoded  # with Pillow

        check_embeds(self.facts)
        rows, grid = _rows_and_grid(given)
        return encoded(rows, tuple(map(int, grid.ravel())), self._width, self._processor)

    def _beside(self, item: ProgramItem) -> Prepared:
        if item.kind == "audio":
            return prepare_sound(item.given, self._processor, self._most_seconds)
        return self._taken(item.given)

    def _taken(self, given: Any) -> Prepared:
        """The item of a video."""
        if not (isinstance(self._videos, VideoProcessor) and self.facts.video_placeholder):
            raise BadRequest("This model takes no videos.", "multi_modal_data")
        from server.media.video_decoding import decode_video  # with Pillow

        if hasattr(given, "ndim"):
            video = _of_frames(given)
        else:
            video = decode_video(_file(given, _VIDEO_FORMS), PreparingLimits().pixels, is_base64=False)
        return self._videos.prepare_video(video, *self._limits)

    def _resized(self, given: object) -> Prepared:
        from PIL import Image  # imported with the first picture

        from server.media.decoding import decode, in_rgb

        if isinstance(given, Image.Image):
            picture = in_rgb(given, self._background)
        else:
            picture = decode(_file(given), PreparingLimits().pixels, self._background)
        return self._processor.prepare(picture)


def _of_frames(given: Any) -> Video:
    """The video of an array of torch or NumPy."""
    from PIL import Image

    frames = np.asarray(given)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or not frames.size:
        raise BadRequest(
            f"{_VIDEO_FORMS} of 8 bits; got {frames.dtype} {list(frames.shape)}.", "multi_modal_data"
        )
    return Video(len(frames), None, lambda numbers: (Image.fromarray(frames[each]) for each in numbers))


def _file(given: object, forms: str = _FORMS) -> bytes:
    match given:
        case bytes() | bytearray():
            return bytes(given)
        case str() | Path():
            return Path(str(given).removeprefix("file://")).read_bytes()
        case _:
            raise TypeError(f"{forms}; got {type(given).__name__}")


def read_pictures(given: object) -> list[object]:
    """The pictures of `multi_modal_data`, behind them its videos, and its sounds; raises TypeError."""
    kinds = {"image", "video", "audio"}
    if not isinstance(given, Mapping) or set(cast("Mapping[str, object]", given)) - kinds:
        raise TypeError(
            "multi_modal_data is {'image': ..., 'video': ..., 'audio': ...} with one or a list of them: "
            f"{_FORMS}; {_VIDEO_FORMS}; {SOUND_FORMS}"
        )
    fields = cast("Mapping[str, object]", given)
    pictures, videos = _several(fields.get("image")), _several(fields.get("video"))
    beside = [ProgramItem("video", each) for each in videos]
    beside += [ProgramItem("audio", each) for each in each_sound(fields.get("audio"))]
    return [*(one for each in pictures for one in _each(each)), *beside]


def _several(given: object) -> list[object]:
    if isinstance(given, list | tuple):
        return cast("list[object]", list(given))
    return [] if given is None else [given]


def _each(given: Any) -> Sequence[object]:
    """The pictures of which a program gives embeddings together: [pictures, N, width], or with grids."""
    if not isinstance(given, Mapping):
        return list(given) if getattr(given, "ndim", 0) == 3 else [given]
    rows, grid = _rows_and_grid(given)
    if rows is None or grid.ndim != 2 or not grid.prod(1).sum():
        return [given]
    patches = grid.prod(1).cumsum()
    pieces = np.split(rows, patches[:-1] * len(rows) // patches[-1])
    return [{_EMBEDS: piece, _GRID: sides} for piece, sides in zip(pieces, grid, strict=True)]


def _is_encoded(given: object) -> bool:
    return isinstance(given, Mapping) or hasattr(given, "ndim")


def _rows_and_grid(given: Any) -> tuple[np.ndarray | None, np.ndarray]:
    """The embeddings that a program gives, and their grid or grids, which are empty if it gives none."""
    rows, grid = (given.get(_EMBEDS), given.get(_GRID)) if isinstance(given, Mapping) else (given, None)
    return _as_array(rows), np.array([] if grid is None else listed(grid), np.int64)


def take_pictures(message: Mapping[str, Any]) -> tuple[dict[str, Any], list[object]]:
    """A message with a part without a file in place of each picture, and the pictures."""
    content, pictures = message.get("content"), list[object]()
    if not isinstance(content, list):
        return dict(message), pictures
    parts: list[object] = []
    for part in cast("list[Any]", content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            parts.append(part)
        elif of := _OWN_PARTS.get(str(kind)) or MEDIA_PARTS.get(str(kind)):
            part = read_part(part) if kind == "input_audio" else part
            given = part[kind] if kind in _OWN_PARTS else part.get(f"{of}_url")
            is_object = isinstance(given, Mapping)
            if kind == _EMBEDS:
                pictures.append(given if is_object else {_EMBEDS: given})
            else:
                item = _by_url(given.get("url") if is_object else given)
                pictures.append(item if of == "image" else ProgramItem(of, item))
            parts.append({"type": f"{of}_url"})
        else:
            raise BadRequest(
                f"Content parts of type {kind!r} are not supported, text, pictures, videos and sounds are.",
                "messages",
            )
    return {**message, "content": parts}, pictures


def _by_url(given: object) -> object:
    """The item of a part, whose URL may hold it."""
    from server.media.decoding import from_base64

    if not isinstance(given, str) or not given.startswith(("data:", "http:", "https:")):
        return given
    head, comma, data = given.partition(",")
    if not comma or not head.endswith(";base64"):
        raise BadRequest(
            "The URL of a picture, video or sound is file:///path or data:TYPE;base64,DATA here: what lies "
            "elsewhere, a program fetches itself.",
            "messages",
        )
    return from_base64(data.encode())


def encode_rows(given: Any, params: SamplingParams, facts: Facts) -> Encoded:
    """Encodes embeddings [N, hidden size], a tensor of torch or an array of NumPy. Raises BadRequest."""
    rows = check_rows(_as_array(given), row_width(facts))
    rows = rows[len(rows) - len(params.cut_prompt([0] * len(rows), facts)) :]
    return Encoded(None, [0] * len(rows), tuple(each.as_media() for each in cut_rows(rows)))


def listed(given: object) -> object:
    """The list of what numpy or torch hold in an array; anything else as it is."""
    to_list = getattr(given, "tolist", None)
    return to_list() if callable(to_list) else given


def _as_array(given: Any) -> np.ndarray | None:
    """The float32 values of a tensor or array; None if they are no real floats."""
    if hasattr(given, "detach"):  # torch's, of which NumPy has no bfloat16
        given = given.detach().cpu()
        given = given.float().numpy() if given.is_floating_point() and not given.is_sparse else None
    real = isinstance(given, np.ndarray) and given.dtype.kind == "f"
    return np.ascontiguousarray(given, np.float32) if real else None
