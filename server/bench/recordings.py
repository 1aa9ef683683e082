"""The recordings of a load: noise that is made, or files; and the forms in which they are sent."""

from __future__ import annotations

import io
import random
import wave
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import msgspec

from server.bench.serve_options import BenchError

_RATE = 16_000
_BOUNDARY = "facet-bench-2f7c1d0ae45b4d3c9a86"
FORM = f"multipart/form-data; boundary={_BOUNDARY}"
"""The content type of forms."""


@dataclass(frozen=True, slots=True)
class Recording:
    name: str
    data: bytes
    seconds: float


def noises(seconds: float, seed: str) -> Iterator[Recording]:
    """Yields recordings without end, none of which is like another."""
    dice = random.Random(seed)
    while True:
        file = io.BytesIO()
        with wave.open(file, "wb") as written:
            written.setnchannels(1)
            written.setsampwidth(2)
            written.setframerate(_RATE)
            written.writeframes(dice.randbytes(2 * round(seconds * _RATE)))
        yield Recording("noise.wav", file.getvalue(), seconds)


def recordings_at(path: Path) -> list[Recording]:
    """The recording of a file, or those of all files in a folder, by name."""
    if find_spec("av") is None:
        raise BenchError(
            "--dataset-path: lengths of recordings are read with PyAV: pip install 'facet-serve[media]'"
        )
    files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
    if not files:
        raise BenchError(f"--dataset-path {path}: the folder has no files")
    return [_read(file) for file in files]


def _read(file: Path) -> Recording:
    import av

    try:
        data = file.read_bytes()
        with av.open(io.BytesIO(data), "r") as container:
            end, stream = 0.0, container.streams.audio[0]
            for packet in container.demux(stream):  # not every container tells its length
                if packet.pts is not None:
                    end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
    except (OSError, ValueError, IndexError) as error:
        reason = getattr(error, "strerror", None) or "it has no sound"
        raise BenchError(f"--dataset-path: {file} is no recording that can be read: {reason}") from error
    if end <= 0:
        raise BenchError(f"--dataset-path: {file} is a recording of no length")
    return Recording(file.name, data, end)


def form_of(recording: Recording, fields: Mapping[str, object]) -> bytes:
    """The body of a request: each field as text, or as JSON, and the recording."""
    parts = [
        part
        for name, value in fields.items()
        for one in (value if isinstance(value, list) else [value])
        for part in (_head(f'name="{name}"'), _text(one), b"\r\n")
    ]
    name = recording.name.replace('"', "%22").replace("\r", "").replace("\n", "")
    parts += [_head(f'name="file"; filename="{name}"'), recording.data]
    return b"".join([*parts, f"\r\n--{_BOUNDARY}--\r\n".encode()])


def _head(about: str) -> bytes:
    return f"--{_BOUNDARY}\r\nContent-Disposition: form-data; {about}\r\n\r\n".encode()


def _text(value: object) -> bytes:
    return value.encode() if isinstance(value, str) else msgspec.json.encode(value)
