"""Sound for models that hear it in pieces of 30 seconds, behind whose end there is silence."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from models.media.files import MediaFiles, read_facts, read_sound_settings
from models.media.hearing import SoundSettings, prepared, read_rows
from models.media.item import Layout, Prepared, run_of
from models.media.whisper import PIECE_FRAMES, STEP


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
