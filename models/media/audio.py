"""Sound for models that hear it: Whisper's features, and the tokens in whose place embeddings are put."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
import numpy as np

from models.media.files import MediaFiles, read_facts, read_sound_settings
from models.media.item import Layout, MediaError, Prepared, run_of
from models.media.whisper import PIECE_FRAMES, PIECE_SECONDS, RATE, STEP, LogMel, scaled_rows

_PIECE = PIECE_FRAMES * STEP


class SoundSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a feature extractor, of which only Whisper's are served."""

    feature_size: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 128
    sampling_rate: Literal[16000] = 16000
    hop_length: Literal[160] = 160
    n_fft: Literal[400] = 400


class _Qwen2AudioFacts(msgspec.Struct):
    audio_token_index: int = 151_646


class Qwen2AudioProcessor:
    placeholder = "<|AUDIO|>"
    written = "<|audio_bos|><|AUDIO|><|audio_eos|>"

    def __init__(self, files: MediaFiles) -> None:
        self.settings = read_sound_settings(files, SoundSettings)
        self._token = read_facts(files, _Qwen2AudioFacts).audio_token_index

    def prepare_audio(self, pieces: Iterable[np.ndarray]) -> Prepared:
        rows, samples = read_rows(pieces, self.settings.feature_size, _PIECE, PIECE_SECONDS)
        frames = -(-samples // STEP)
        if (tokens := -(-frames // 2) // 2) == 0:
            raise MediaError("This model hears no sound of less than 0.03 seconds.")
        return prepared(rows[: frames + 2], frames, tokens)  # two more frames are read by convolutions

    def layout(self, prepared: Prepared) -> Layout:
        return run_of(self._token, prepared.embeddings)


class _Qwen3Audio(msgspec.Struct, frozen=True):
    n_window: Annotated[int, msgspec.Meta(ge=1, le=1 << 14)] = 50


class _Qwen3Facts(msgspec.Struct):
    audio_token_id: int = 151_676
    audio_config: _Qwen3Audio = _Qwen3Audio()


class Qwen3ASRProcessor:
    placeholder = "<|audio_pad|>"
    written = "<|audio_start|><|audio_pad|><|audio_end|>"
    transcribes = "qwen3_asr"
    """The kind of chats that are transcriptions."""
    seconds = 1200.0
    """The longest sound, as its authors cut them."""
    least = RATE // 2

    def __init__(self, files: MediaFiles) -> None:
        self.settings = read_sound_settings(files, SoundSettings)
        self._facts = read_facts(files, _Qwen3Facts)

    def prepare_audio(self, pieces: Iterable[np.ndarray]) -> Prepared:
        rows, _ = read_rows(pieces, self.settings.feature_size, self.least, self.seconds)
        whole, rest = divmod(len(rows), chunk := 2 * self._facts.audio_config.n_window)
        return prepared(rows, len(rows), whole * -(-chunk // 8) + -(-rest // 8))

    def layout(self, prepared: Prepared) -> Layout:
        return run_of(self._facts.audio_token_id, prepared.embeddings)


class _AudioSizes(msgspec.Struct, frozen=True):
    hidden_size: int = 1280
    intermediate_size: int = 5120


class _VoxtralFacts(msgspec.Struct):
    audio_token_id: int = 24
    audio_config: _AudioSizes = _AudioSizes()


class VoxtralProcessor:
    placeholder = "[AUDIO]"
    written = "[BEGIN_AUDIO][AUDIO]"
    transcribes = "voxtral"
    seconds = 2400.0
    """The longest sound, as its authors say."""

    def __init__(self, files: MediaFiles) -> None:
        self.settings = read_sound_settings(files, SoundSettings)
        facts = read_facts(files, _VoxtralFacts)
        self._token, sizes = facts.audio_token_id, facts.audio_config
        self._tokens = PIECE_FRAMES // 2 * sizes.hidden_size // sizes.intermediate_size

    def prepare_audio(self, pieces: Iterable[np.ndarray]) -> Prepared:
        rows, samples = read_rows(pieces, self.settings.feature_size, None, self.seconds)
        return prepared(rows, -(-samples // STEP), len(rows) // PIECE_FRAMES * self._tokens)

    def layout(self, prepared: Prepared) -> Layout:
        return run_of(self._token, prepared.embeddings)


def read_rows(
    pieces: Iterable[np.ndarray], bands: int, least: int | None, most_seconds: float
) -> tuple[np.ndarray, int]:
    """The features [frames, bands] of a sound, with silence behind it up to `least` samples, and its samples.
    Without `least`, silence makes its last piece a whole one.

    Raises MediaError for a longer one.
    """
    made, rows, samples = LogMel(bands), list[np.ndarray](), 0
    for piece in pieces:
        samples += len(piece)
        if samples > most_seconds * RATE:
            raise MediaError(
                f"This model hears {most_seconds:g} seconds of a sound at most: send parts of it."
            )
        rows += made.push(piece)
    whole = max(1, -(-samples // _PIECE)) * _PIECE
    rows += made.flush(whole if least is None else least)
    found = np.concatenate(rows)
    return scaled_rows(found, float(found.max())), samples


def prepared(rows: np.ndarray, frames: int, tokens: int) -> Prepared:
    """The item of features [rows, bands], of which so many frames are heard, and of so many embeddings."""
    features = np.ascontiguousarray(rows.T)
    shape = (*features.shape, features.itemsize)
    return Prepared("audio", memoryview(features.tobytes()), shape, (1, 1, frames), tokens)
