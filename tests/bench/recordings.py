"""Puts load on `/v1/audio/transcriptions`: noise that is made, or the recordings of a folder, in streams.

python tests/bench/recordings.py [--audio-seconds S | --recordings PATH] [options of facet bench serve]
"""

from __future__ import annotations

import io
import random
import statistics
import sys
import wave
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count, cycle
from pathlib import Path
from typing import Annotated

import msgspec
import uvloop
from programs import run_program

from server.bench.answers import StreamedAnswer, Usage, WholeAnswer
from server.bench.endpoints import LoadRequest, Outcome, Sender
from server.bench.http_client import Client, first_model
from server.bench.load_generator import run_load, summarize, table
from server.bench.serve_benchmark import loads
from server.bench.serve_options import METRICS, BenchError, LoadOptions, check_load, read_values
from server.options.option_parsing import OptionDoc, assemble, options_of

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
        raise BenchError("--recordings: lengths of recordings are read with PyAV: pip install av")
    files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
    if not files:
        raise BenchError(f"--recordings {path}: the folder has no files")
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
        raise BenchError(f"--recordings: {file} is not a recording that can be read: {reason}") from error
    if end <= 0:
        raise BenchError(f"--recordings: {file} is a recording of no length")
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


class SoundOptions(msgspec.Struct, frozen=True, kw_only=True):
    audio_seconds: Annotated[float, OptionDoc("Recordings", least=0.1)] = 30.0
    """Seconds of noise in a request."""
    recordings: Annotated[str | None, OptionDoc("Recordings")] = None
    """A recording, or a folder of recordings, to send in place of noise."""
    load: LoadOptions = msgspec.field(default_factory=LoadOptions)


class _Form(bytes):
    """The body of a request, which knows how many seconds of sound it has."""

    seconds: float


@dataclass(frozen=True, slots=True)
class RecordingRequest(LoadRequest):
    recording: Recording | None = None


class _Event(msgspec.Struct):
    type: str = ""
    delta: str = ""
    usage: _Tokens | None = None


class _Tokens(msgspec.Struct):
    input_tokens: int = 0
    output_tokens: int = 0


class Transcription(StreamedAnswer):
    """A transcription that comes as server-sent events."""

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            return
        event = msgspec.json.decode(data, type=_Event)
        if event.delta:
            self.times.append(now)
        if event.type == "transcript.text.done":
            tokens = event.usage or _Tokens()
            self.usage, self._done = Usage(tokens.input_tokens, tokens.output_tokens), True
        elif not event.type.startswith("transcript."):
            super()._take(data, now)


class RecordingSender(Sender):
    def __init__(self, client: Client, model: str, options: LoadOptions) -> None:
        super().__init__(client, model, options)
        self._path, self._about = "/v1/audio/transcriptions", FORM
        fields: dict[str, object] = {"model": model, "stream": True, "stream_include_usage": True}
        if options.temperature is not None:
            fields["temperature"] = options.temperature
        self._fields = fields | options.extra_body
        self.heard: list[tuple[float, Outcome]] = []
        """The seconds of sound of each request, and its outcome."""

    def write(self, request: LoadRequest) -> bytes:
        assert isinstance(request, RecordingRequest) and request.recording is not None
        form = _Form(form_of(request.recording, self._fields))
        form.seconds = request.recording.seconds
        return form

    async def send(
        self, message: bytes, inputs: int, due: float, answer: WholeAnswer | None = None
    ) -> Outcome:
        outcome = await super().send(message, inputs, due, answer or Transcription())
        assert isinstance(message, _Form)
        self.heard.append((message.seconds, outcome))
        return outcome


def endless_recordings(options: SoundOptions, salt: int) -> Iterator[LoadRequest]:
    if options.recordings is not None:
        found: Iterator[Recording] = cycle(recordings_at(Path(options.recordings)))
    else:
        found = noises(options.audio_seconds, f"{options.load.seed} {salt}")
    return (RecordingRequest([each.name], recording=each) for each in found)


def run(arguments: Sequence[str], command: str) -> int:
    """Returns 1 if a request has failed."""
    options = assemble(SoundOptions, read_values(arguments, command, options_of(SoundOptions)))
    check_load(options.load)
    return uvloop.run(_measure(options))


async def _measure(options: SoundOptions) -> int:
    load_options, failed = options.load, 0
    with closing(Client(load_options.url, load_options.api_key, load_options.request_timeout)) as client:
        model = load_options.model or (await first_model(client, load_options.url)).id
        for salt, load in zip(count(), loads(load_options), strict=False):
            sender, outcomes = RecordingSender(client, model, load_options), list[Outcome]()
            requests = endless_recordings(options, salt)
            seconds = await run_load(load, sender, requests, outcomes.append)
            figures = summarize(load, outcomes, seconds, load_options.metric_percentiles)
            print(table([figures], load_options.percentile_metrics or METRICS))
            print(told(sender.heard, seconds), flush=True)
            failed += figures.failed
    return 1 if failed else 0


def told(heard: Sequence[tuple[float, Outcome]], seconds: float) -> str:
    """A line with the seconds of sound that were read in a second, and the mean real-time factor."""
    good = [(length, outcome) for length, outcome in heard if outcome.error is None]
    if not good:
        return "no recording was read"
    rate = sum(length for length, _ in good) / seconds
    factor = statistics.fmean(outcome.e2el / length for length, outcome in good)
    return f"seconds of sound/s {rate:.2f}, real-time factor {factor:.3f}"


if __name__ == "__main__":
    sys.exit(run_program(run, "recordings.py"))
