"""Sounds that a program hands over: samples in arrays, or files."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np

from models.media.item import AudioProcessor, Prepared, Processor
from models.media.whisper import RATE
from server.errors import BadRequest
from server.media.audio.decoding import decode_audio, resampled

SOUND_FORMS = (
    f"a sound is an array of samples from -1 to 1 at {RATE} Hz, (array, rate), the path of a file, or a "
    "file's bytes"
)


def each_sound(given: object) -> list[object]:
    """The sounds of `multi_modal_data`: one, or a list of them."""
    if isinstance(given, list):
        return cast("list[object]", given)
    return [] if given is None else [given]


def prepare_sound(given: object, processor: Processor, most_seconds: float) -> Prepared:
    """The item of a sound. Raises BadRequest and MediaError for what the model does not hear."""
    if not isinstance(processor, AudioProcessor):
        raise BadRequest("This model hears no sounds.", "multi_modal_data")
    return processor.prepare_audio(samples_of(given, most_seconds))


def samples_of(given: object, most_seconds: float) -> Iterator[np.ndarray]:
    """The samples of a sound in pieces, at Whisper's rate."""
    match given:
        case bytes() | bytearray():
            return decode_audio(BytesIO(given), most_seconds)
        case str() | Path():
            file = Path(str(given).removeprefix("file://")).read_bytes()
            return decode_audio(BytesIO(file), most_seconds)
        case (array, int() | float() as rate):
            return _of_array(array, rate)
        case _:
            return _of_array(given, RATE)


def _of_array(given: Any, rate: float) -> Iterator[np.ndarray]:
    if hasattr(given, "detach"):  # torch's
        given = given.detach().cpu().float().numpy()
    if not (isinstance(given, np.ndarray) and given.dtype.kind == "f" and given.ndim == 1 and len(given)):
        raise TypeError(f"{SOUND_FORMS}; got {type(given).__name__}")
    return resampled(np.ascontiguousarray(given, np.float32), round(rate))
