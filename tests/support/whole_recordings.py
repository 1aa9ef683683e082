"""The rows of features of whole recordings, which the product makes block by block as it decodes."""

from collections.abc import Iterable, Iterator

import numpy as np

from models.media.whisper import LogMel


def log_mel(pieces: Iterable[np.ndarray], bands: int) -> Iterator[np.ndarray]:
    """Blocks of rows of a whole recording."""
    made = LogMel(bands)
    for samples in pieces:
        yield from made.push(samples)
    yield from made.flush()
