"""Queries of models that only read documents: their tokens have weights, for which no step is needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine_core.protocol import AddRequest, Pooled
from models.pooling.routed_folder import query_weights
from models.pooling.sentence_files import read_settings
from worker.protocol import Pooling, Vectors


class StaticQueries:
    """The weights of tokens, where a token counts once however often it stands in a query."""

    def __init__(self, weights: NDArray[np.float32], most: int | None) -> None:
        """`most`: how many weights of a query are kept, the largest ones; None is all."""
        self._weights, self._most = weights, most

    @classmethod
    def open(cls, folder: Path) -> StaticQueries | None:
        """Read the weights of a model; None if it reads queries as it does documents."""
        path = query_weights(folder)
        if path is None:
            return None
        from safetensors.numpy import load_file  # few models need it

        weights = load_file(path)["weight"].astype(np.float32)
        return cls(weights, read_settings(folder).max_active_dims)

    def answer(self, request: AddRequest) -> Pooled | None:
        """The weights of a query; None if the request is none for these."""
        params = request.params
        if (
            not isinstance(params, Pooling)
            or not params.query
            or params.task != "sparse_embed"
            or params.outputs
        ):
            return None
        ids = np.unique(np.asarray(request.tokens))
        ids = ids[ids < len(self._weights)]
        ids = ids[self._weights[ids] > 0]
        if self._most is not None and len(ids) > self._most:
            ids = np.sort(ids[np.argsort(-self._weights[ids], kind="stable")[: self._most]])
        weights = self._weights[ids].astype("<f4")
        return Pooled(request.id, Vectors(weights.tobytes(), weights.shape, ids.astype("<i4").tobytes()))
