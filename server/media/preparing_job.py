"""Prepares media in a helper process, one item at a time."""

from __future__ import annotations

import logging
import os
import warnings
from io import BytesIO

import msgspec

from models.media.files import with_settings
from models.media.item import AudioProcessor, Prepared, Processor, VideoProcessor
from models.media.registry import make_processor
from models.media.resize import fitted
from server.errors import BadRequest
from server.helpers.messages import FollowOrder
from server.media.audio.audio_decoding import decode_audio
from server.media.failures import refused_unless_read
from server.media.image_embeds import read_encoded
from server.media.picture_decoding import decode, from_base64
from server.media.preparing import NAMES, PreparingLimits, PreparingOrder, PreparingSetup
from server.media.video_decoding import decode_video

LOW_DETAIL = 512
"""The square in pixels into which a picture is fitted whose request asks for low detail, as OpenAI does."""
_NICE = 10
"""How far an item gives way to steps and to the server: without, the gaps of a stream are twice as long."""


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
