"""Vectors of similar tokens become one: Ward's clustering, as scipy computes it, by chains of neighbours."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.pooling.representations import TokenVectors


def reduce_tokens(which: TokenVectors, rows: Tensor, query: bool) -> Tensor:
    """The vectors [K, D] of a text's tokens, some of them merged -> [K', D].

    The host groups them, which a device has to wait for.
    """
    pooling = which.pooling
    if pooling is None or not which.pools(query=query):
        return rows
    protected, others = rows[: pooling.num_protected_tokens], rows[pooling.num_protected_tokens :]
    groups = max(int(len(others) // pooling.pool_factor), 1)
    if groups < len(others):
        similarity = (others @ others.T).cpu().numpy()
        labels = torch.from_numpy(group(np.clip(1 - similarity, 0, 2), groups)).to(rows.device)
        sums = torch.zeros(int(labels.max()) + 1, rows.shape[1], device=rows.device).index_add_(
            0, labels, others
        )
        rows = torch.cat([protected, sums / labels.bincount().unsqueeze(1)])
    return torch.nn.functional.normalize(rows, dim=-1) if pooling.normalize_embeddings else rows


def group(distances: NDArray[np.float32], most: int) -> NDArray[np.int64]:
    """Put points with these distances [N, N] into `most` groups: the number of each one's group.

    The two groups whose union spreads least are joined, again and again.
    """
    count = len(distances)
    squares = distances.astype(np.float64) ** 2
    np.fill_diagonal(squares, np.inf)
    sizes = np.ones(count)
    joins: list[tuple[float, int, int]] = []
    chain: list[int] = []
    while len(joins) < count - 1:
        if not chain:
            chain.append(int(np.flatnonzero(sizes)[0]))
        last = chain[-1]
        near = int(squares[last].argmin())
        if len(chain) > 1 and squares[last, chain[-2]] <= squares[last, near]:
            near = chain[-2]
            chain = chain[:-2]
            one, other = min(last, near), max(last, near)
            joins.append((float(squares[one, other]), one, other))
            _join(squares, sizes, one, other)
        else:
            chain.append(near)
    parents = list(range(count))
    for _, one, other in sorted(joins, key=lambda join: join[0])[
        : count - most
    ]:  # stable: a union comes later
        parents[_root(parents, other)] = _root(parents, one)
    return np.unique([_root(parents, at) for at in range(count)], return_inverse=True)[1]


def _join(squares: NDArray[np.float64], sizes: NDArray[np.float64], one: int, other: int) -> None:
    """Let the group `one` have the points of `other`, which is empty then."""
    total = sizes + sizes[one] + sizes[other]
    row = (sizes + sizes[one]) * squares[one] + (sizes + sizes[other]) * squares[other]
    row = (row - sizes * squares[one, other]) / total
    sizes[one] += sizes[other]
    sizes[other] = 0
    row[sizes == 0] = np.inf
    row[one] = np.inf
    squares[one] = squares[:, one] = row
    squares[other] = squares[:, other] = np.inf


def _root(parents: list[int], at: int) -> int:
    while parents[at] != at:
        at = parents[at]
    return at
