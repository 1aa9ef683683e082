"""Reads recordings in a helper process, one at a time."""

from __future__ import annotations

import warnings
from pathlib import Path

import msgspec

from server.errors import BadRequest
from server.helpers.messages import FollowOrder
from server.media.audio.audio_decoding import decode_audio
from server.media.audio.recordings import Heard, RecordingOrder, RecordingSetup, open_file, write_features
from server.media.failures import refused_unless_read


def open_job(data: bytes) -> FollowOrder:
    setup = msgspec.msgpack.decode(data, type=RecordingSetup)
    warnings.simplefilter("ignore")

    def read(order: bytes, _: bytes) -> Heard:
        asked = msgspec.msgpack.decode(order, type=RecordingOrder)
        try:
            source, target = open_file(Path(asked.source)), open_file(Path(asked.target))
        except FileNotFoundError:
            raise BadRequest("The recording is gone.", "file") from None  # its client has left before
        with source, target, refused_unless_read("recording", "file"):
            return write_features(decode_audio(source, setup.seconds), setup.bands, target)

    return read
