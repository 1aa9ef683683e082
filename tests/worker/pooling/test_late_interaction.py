"""Scores by late interaction, and the store of query vectors."""

from __future__ import annotations

import pytest
import torch

from worker.pooling.late_interaction import QueryStore, max_sim


def test_the_query_that_was_used_longest_ago_is_dropped() -> None:
    queries = QueryStore(max_bytes=100)
    for name in ("a", "b"):
        queries.put(name, torch.ones(3, 4))  # 48 bytes
    assert queries.get("a") is not None
    queries.put("c", torch.ones(3, 4))
    assert queries.get("b") is None
    assert queries.get("a") is not None and queries.get("c") is not None
    queries.put("a", torch.zeros(3, 4))  # takes its own place
    assert queries.get("c") is not None
    queries.put("huge", torch.ones(100, 4))
    assert [queries.get(name) is None for name in ("a", "c", "huge")] == [True, True, False]


def test_max_sim() -> None:
    query, document = torch.tensor([[1.0, 0], [0, 2]]), torch.tensor([[0.5, 0.5], [0.1, 0.9], [-3, 0]])
    assert max_sim(query, document).tolist() == pytest.approx([0.5 + 1.8])
    assert max_sim(query, torch.empty(0, 2)).tolist() == [0.0]
