"""Texts that are longer than the model reads: if the operator wants it, they are read in windows that know
nothing of each other."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from server.model_facts import Facts
from server.requests.pooling import PooledText
from server.requests.vectors import as_array
from server.text.tokenizer import unpack
from worker.protocol import Pooling, Vectors


def read_in_windows(items: list[PooledText], facts: Facts) -> list[PooledText]:
    """The items; one that is longer than the model reads is its first window, and has the others."""
    most = facts.max_text_len
    return [_divided(item, most, facts) if item.length > most else item for item in items]


def _divided(item: PooledText, most: int, facts: Facts) -> PooledText:
    ids = unpack(item.tokens)
    starts = range(0, len(ids), most)
    modes = facts.pooling.modes or (("LAST",) if facts.ready.worker.causal else ("CLS",))
    if modes in (("CLS",), ("LAST",)):  # which are in one window
        starts = starts[:1] if modes == ("CLS",) else starts[-1:]
    first, *others = [_window(ids[start : start + most], item.params, start) for start in starts]
    return msgspec.structs.replace(first, windows=others)


def _window(ids: list[int], params: Pooling, start: int) -> PooledText:
    """The window that begins with this token of a text, of whose instruction it has what is left there."""
    return PooledText(ids, msgspec.structs.replace(params, skip=max(0, params.skip - start)))


def join_windows(item: PooledText, answers: Sequence[Vectors], facts: Facts) -> Vectors:
    """Returns the mean of the vectors of a text's windows, in which each weighs as much as it has tokens
    behind an instruction that stays out of vectors.

    It has the length 1 if theirs have.
    """
    windows = (item, *item.windows)
    weights = [max(1, window.length - window.params.skip) for window in windows]
    rows = np.stack([as_array(answer) for answer in answers]).astype(np.float64)
    joined = np.average(rows, axis=0, weights=weights)
    length = np.linalg.norm(joined)
    if _normalizes(item.params, facts) and length:
        joined = joined / length
    return Vectors(joined.astype("<f4").tobytes(), joined.shape)


def _normalizes(params: Pooling, facts: Facts) -> bool:
    asked = (params.use_activation, facts.pooling.use_activation, facts.pooling.normalize)
    return next(each for each in asked if each is not None)
