"""Bounds as small as they can be, for ranks that a network lies before.

Bits take a kilobyte for each 8,000 tokens and row, and every step has some. Mostly nearly all tokens may
come, or nearly none, and then a few ids say the same. Ids are made in the time in which a process of this
machine would have read the bits.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from worker.protocol import Bound, StepBounds

_WORD = 32
_ID_BYTES = 4


def shrunk(bounds: StepBounds, vocab_size: int) -> StepBounds:
    """The same bounds, each in its smallest form."""
    rows = {slot: each and _smallest(each, vocab_size) for slot, each in bounds.rows.items()}
    return replace(bounds, rows=rows)


def _smallest(bound: Bound, vocab_size: int) -> Bound:
    bits = bound.data
    if bound.form != "bits" or len(bits) != _WORD // 8 * -(-vocab_size // _WORD):
        return bound
    allowed = int.from_bytes(bits, "little").bit_count()  # and bits beyond the vocabulary, at most
    if _ID_BYTES * min(allowed, vocab_size - allowed) >= len(bits):
        return bound
    words = np.frombuffer(bits, "<u4")
    if allowed <= vocab_size - allowed:
        return Bound("allowed", _ids(words, vocab_size))
    return Bound("forbidden", _ids(~words, vocab_size))


def _ids(words: np.ndarray, vocab_size: int) -> bytes:
    """The tokens whose bits are set, as int32."""
    places = np.flatnonzero(words)
    bits = np.unpackbits(words[places].view(np.uint8), bitorder="little").reshape(-1, _WORD)
    rows, columns = bits.nonzero()
    ids = places[rows] * _WORD + columns
    return ids[ids < vocab_size].astype("<i4").tobytes()
