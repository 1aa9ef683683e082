"""Late interaction: a document's score is the sum, over a query's tokens, of the best match in the document.

A query's vectors stay here under a name, so that its documents bring nothing but themselves and answer with
one number. They are kept within a bound: the query that was used longest ago makes way.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

KEPT_BYTES = 64 << 20


class Queries:
    def __init__(self, max_bytes: int = KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[str, Tensor] = OrderedDict()

    def keep(self, name: str, vectors: Tensor) -> None:
        """The newest is always kept, however large it is."""
        self._drop(name)
        self._kept[name] = vectors.clone()  # or all that was pooled with it would stay in memory
        self._bytes += vectors.nbytes
        while self._bytes > self._max_bytes and len(self._kept) > 1:
            self._drop(next(iter(self._kept)))

    def find(self, name: str) -> Tensor | None:
        """[Q, D]; its use counts as recent."""
        if name in self._kept:
            self._kept.move_to_end(name)
        return self._kept.get(name)

    def _drop(self, name: str) -> None:
        gone = self._kept.pop(name, None)
        self._bytes -= gone.nbytes if gone is not None else 0


def max_sim(query: Tensor, document: Tensor) -> Tensor:
    """[Q, D] and [K, D] float32 -> [1]. A text without tokens has nothing in common with any."""
    if not len(query) or not len(document):
        return torch.zeros(1, device=document.device)
    return (query @ document.T).amax(dim=1).sum().unsqueeze(0)
