"""Threads that compile kernels while a model loads take no more cores than they may."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("interpreted")  # before any kernel is imported

from worker.kernels.cuda.compiling import model_variants


def test_ranks_share_the_cores_that_a_container_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, most: int, **given: Any) -> None:
            threads.append(most)
            super().__init__(most, **given)

    monkeypatch.setattr(model_variants, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr(model_variants, "usable_cores", lambda: 5)
    for ranks in (1, 2):
        with model_variants.compiling(list, None, (0, ranks)):
            pass
    assert threads == [4, 2]
