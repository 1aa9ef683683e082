"""Sentences that the speech synthesizer espeak-ng says, from a package that carries it (espeakng-loader)."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

RATE = 16_000
_RETRIEVAL, _UTF8 = 1, 1
_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


def say(*sentences: str, voice: str = "en-us") -> list[np.ndarray]:
    """Each sentence as samples of 16 kHz in [-1, 1]. Skips the test where the package is absent."""
    loader: Any = pytest.importorskip("espeakng_loader", reason="espeakng-loader is absent")
    library = ctypes.CDLL(loader.get_library_path())
    heard: list[np.ndarray] = []

    def keep(samples: Any, count: int, _events: object) -> int:
        if samples and count:
            heard.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    callback = _Callback(keep)
    rate = library.espeak_Initialize(_RETRIEVAL, 0, loader.get_data_path().encode(), 0)
    assert rate > 0, "espeak-ng has not found its data"
    library.espeak_SetSynthCallback(callback)
    library.espeak_SetVoiceByName(voice.encode())
    said: list[np.ndarray] = []
    for sentence in sentences:
        heard.clear()
        text = sentence.encode() + b"\0"
        library.espeak_Synth(text, len(text), 0, 0, 0, _UTF8, None, None)
        library.espeak_Synchronize()
        samples = np.concatenate(heard) / 32_768
        at = np.arange(0, len(samples) - 1, rate / RATE)
        said.append(np.interp(at, np.arange(len(samples)), samples).astype(np.float32))
    library.espeak_Terminate()
    return said
