"""The random numbers of draws: a fixed hash of (seed, output index), whatever the device, batch or rank."""

from __future__ import annotations

import numpy as np

STEP = 0x9E37_79B9_7F4A_7C15
"""The distance of SplitMix64's counters."""


def uniform(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """31 random bits for each pair: output number `counter` of SplitMix64, started at mix(seed)."""
    words = stream(seeds) + (counters.astype(np.uint64) + np.uint64(1)) * np.uint64(STEP)
    return (mix(words) >> np.uint64(33)).astype(np.int64)


def stream(seeds: np.ndarray) -> np.ndarray:
    """The word at which the numbers of each seed begin, as uint64."""
    return mix(seeds.astype(np.uint64))


def mix(word: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: every bit of the input reaches every bit of the output."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
