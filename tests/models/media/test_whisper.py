"""Whisper's features against transformers' own, of recordings that come in pieces."""

import numpy as np
import pytest
from later import Later
from sounds import noise, tone
from whole_recordings import log_mel

from models.media.whisper import PIECE_FRAMES, scaled

transformers = Later("transformers")


@pytest.mark.parametrize("bands", (80, 128))
@pytest.mark.parametrize("seconds", (0.1, 30.005, 65.0))
def test_features_are_those_of_transformers(bands: int, seconds: float) -> None:
    samples = noise(seconds) * np.abs(tone(seconds, 0.1, 1.0))
    extractor = transformers.WhisperFeatureExtractor(feature_size=bands)
    missing = max(0, PIECE_FRAMES * 160 - len(samples))
    padded = np.pad(samples, (0, missing)).astype(np.float32)
    wanted = extractor._np_extract_fbank_features(padded[None], "cpu")[0]
    rows = np.concatenate(list(log_mel(np.array_split(samples, 7), bands)))
    pieces = [scaled(rows[at : at + PIECE_FRAMES], rows.max()) for at in range(0, len(rows), PIECE_FRAMES)]
    found = np.concatenate(pieces, 1)
    assert wanted.shape == (bands, len(rows))
    assert np.abs(found[:, : len(rows)] - wanted).max() < 1e-5
    assert not found[:, len(rows) :].any()


def test_pieces_of_any_length_give_the_same_rows() -> None:
    samples = noise(31.0)
    whole = np.concatenate(list(log_mel([samples], 80)))
    cut = np.split(samples, [1, 2, 150, 201, 202, 9_999, 400_000])
    assert np.allclose(np.concatenate(list(log_mel(cut, 80))), whole, atol=1e-6)
