"""Sounds that are computed, of which transformers' transcripts are stored."""

from __future__ import annotations

import numpy as np

from models.media.whisper import RATE, LogMel, scaled

_SECONDS, _BANDS = 3, 80
_FORMANTS = ((700.0, 1200.0), (300.0, 2300.0), (400.0, 800.0))
"""The loud frequencies of the vowels a, i and u, which follow each other."""


def sound(pitch: int) -> np.ndarray:
    """Samples of vowels that a voice of this pitch might sing, three a second."""
    time = np.arange(_SECONDS * RATE) / RATE
    vowel = (3 * time).astype(np.int64) % len(_FORMANTS)
    samples = np.zeros_like(time)
    for harmonic in range(1, 3000 // pitch):
        hertz = harmonic * pitch
        near = [sum(1 / (1 + ((hertz - each) / 80) ** 2) for each in formants) for formants in _FORMANTS]
        samples += np.array(near)[vowel] * np.sin(2 * np.pi * hertz * time)
    breaths = np.minimum(1, 4 * np.abs(np.sin(3 * np.pi * time)))
    return (0.2 * samples * breaths).astype(np.float32)


def features(samples: np.ndarray) -> np.ndarray:
    """The features [bands, frames] of samples with silence behind them, for Whispers before large-v3."""
    made = LogMel(_BANDS)
    rows = np.concatenate([*made.push(samples), *made.flush()])
    return scaled(rows, rows.max())
