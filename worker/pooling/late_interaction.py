"""Late interaction: a document's score is the sum, over a query's tokens, of the best match in the document.

A query's vectors are stored here under a name, so that its documents bring nothing but themselves and are
answered with one number. The store is bounded: the query that was used longest ago is dropped first.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

MOST_BYTES = 64 << 20


class QueryStore:
    def __init__(self, max_bytes: int = MOST_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._vectors: OrderedDict[str, Tensor] = OrderedDict()

    def put(self, name: str, vectors: Tensor) -> None:
        """Store a query's vectors [Q, D]. The newest query is stored however large it is."""
        self._drop(name)
        self._vectors[name] = vectors.clone()  # or all that was pooled with it would stay in memory
        self._bytes += vectors.nbytes
        while self._bytes > self._max_bytes and len(self._vectors) > 1:
            self._drop(next(iter(self._vectors)))

    def get(self, name: str) -> Tensor | None:
        """The vectors [Q, D] of a query, which counts as its latest use."""
        if name in self._vectors:
            self._vectors.move_to_end(name)
        return self._vectors.get(name)

    def _drop(self, name: str) -> None:
        vectors = self._vectors.pop(name, None)
        self._bytes -= vectors.nbytes if vectors is not None else 0


def max_sim(query: Tensor, document: Tensor) -> Tensor:
    """The score [1] of a document [K, D] for a query [Q, D], float32; 0 if one of them has no tokens."""
    if not len(query) or not len(document):
        return torch.zeros(1, device=document.device)
    return (query @ document.T).amax(dim=1).sum().unsqueeze(0)
