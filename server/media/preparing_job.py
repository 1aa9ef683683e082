"""Prepares media in a helper process, one item at a time: pictures, sounds, videos, and the embeddings of
pictures that clients have encoded, which are checked and laid out like those of the tower."""

from __future__ import annotations

import logging
import os
import warnings
from io import BytesIO
from math import prod

import msgspec
import numpy as np
from msgspec.structs import replace

from models.media.files import with_settings
from models.media.item import AudioProcessor, MediaError, Prepared, Processor, VideoProcessor
from models.media.registry import make_processor
from models.media.resize import fitted
from server.errors import BadRequest
from server.helpers.messages import FollowOrder
from server.media.audio.audio_decoding import decode_audio
from server.media.failures import refused_unless_read
from server.media.picture_decoding import decode, from_base64
from server.media.preparing import NAMES, PreparingLimits, PreparingOrder, PreparingSetup
from server.media.tensor_files import is_matrix, read_tensor, without_batch
from server.media.video_decoding import decode_video

LOW_DETAIL = 512
"""The square in pixels into which a picture is fitted whose request asks for low detail, as OpenAI does."""
_NICE = 10
"""How far an item gives way to steps and to the server: without, the gaps of a stream are twice as long."""
_NO_GRID = (1, 0, 0)
"""A grid without patches, of which no picture has embeddings where its grid says how many it has."""
_MOST_PATCHES = 1 << 12
"""The most patches that may become one embedding."""


def open_job(data: bytes) -> FollowOrder:
    os.nice(_NICE)
    setup = msgspec.msgpack.decode(data, type=PreparingSetup)
    logging.getLogger("PIL").setLevel(logging.CRITICAL)  # anybody may send files that Pillow complains about
    warnings.simplefilter("ignore")
    processor, limits = make_processor(setup.files), setup.limits

    def prepare(order: bytes, data: bytes) -> Prepared:
        asked = msgspec.msgpack.decode(order, type=PreparingOrder)
        with refused_unless_read(NAMES[asked.kind]):
            own = make_processor(with_settings(setup.files, asked.settings)) if asked.settings else None
            item = _prepared(data, asked, own or processor, limits)
        if item.embeddings > limits.embeddings:
            raise BadRequest(
                f"A {NAMES[asked.kind]} may become {limits.embeddings} tokens at most, and this one "
                f"becomes {item.embeddings}: send a smaller one."
            )
        return item

    return prepare


def _prepared(data: bytes, asked: PreparingOrder, processor: Processor, limits: PreparingLimits) -> Prepared:
    if isinstance(processor, AudioProcessor):
        file = from_base64(data) if asked.is_base64 else data
        return processor.prepare_audio(decode_audio(BytesIO(file), limits.sound_seconds))
    if asked.grid is not None:
        return read_encoded(data, asked.grid, limits.width, processor)
    if asked.kind == "video" and isinstance(processor, VideoProcessor):
        video = decode_video(data, limits.pixels, is_base64=asked.is_base64)
        return processor.prepare_video(video, limits.frames, limits.embeddings)
    picture = decode(from_base64(data) if asked.is_base64 else data, limits.pixels, asked.background)
    return processor.prepare(fitted(picture, LOW_DETAIL) if asked.low_detail else picture)


def read_encoded(file: bytes, grid: str, width: int, processor: Processor) -> Prepared:
    """The item that a file of embeddings in base64 becomes. `grid`: three numbers with commas between, such a
    file with them, or nothing. Raises MediaError."""
    try:
        rows, sides = read_tensor(from_base64(file)), _read_grid(grid)
    except MemoryError:
        raise
    except Exception:  # libraries raise whatever they like for files that anybody may have written
        raise MediaError(
            "image_embeds is the base64 of a file of torch.save, safetensors or numpy.save with one "
            f"contiguous tensor [embeddings, {width}] in float32, float16 or bfloat16, and image_grid_thw a "
            "list of three whole numbers, or the base64 of such a file with them."
        ) from None
    return encoded(rows, sides, width, processor)


def _read_grid(grid: str) -> tuple[int, ...]:
    if not grid or "," in grid:
        return tuple(map(int, grid.split(","))) if grid else ()
    return tuple(int(value) for value in read_tensor(from_base64(grid.encode())).ravel())


def encoded(rows: np.ndarray | None, sides: tuple[int, ...], width: int, processor: Processor) -> Prepared:
    """The item that float32 embeddings [N, width] become. `sides`: its grid, or nothing. Raises
    MediaError."""
    rows = None if rows is None else without_batch(rows)
    if not processor.placeholder:
        raise MediaError("This model compares pictures with texts: send pictures, not image_embeds.")
    if rows is None or rows.dtype != np.float32 or not is_matrix(rows, width):
        shape = "" if rows is None else f", and these have the shape {list(rows.shape)}"
        raise MediaError(
            f"image_embeds are finite numbers in rows of {width}, for each embedding one{shape}."
        )
    count = len(rows)
    grid = (sides[0], sides[1], sides[2]) if len(sides) == 3 else _NO_GRID
    item = Prepared("encoded", memoryview(rows.tobytes()), (count, width, 4), grid, count)
    possible = not sides or (min(grid) > 0 and prod(grid) <= count * _MOST_PATCHES)
    wanted = sum(length for _, length in processor.layout(item).embeddings) if possible else 0
    if not count or wanted != count:
        told = f"image_grid_thw {list(sides)}" if sides else "no image_grid_thw"
        raise MediaError(
            f"A picture with {told} has {wanted} embeddings of this model, and image_embeds has {count}: the "
            "grid is the frames, rows and columns of patches, of models whose pictures have any shape."
        )
    return item if sides else replace(item, grid=(1, 1, count))
