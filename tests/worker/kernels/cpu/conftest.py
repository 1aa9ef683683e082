"""Fixtures of the C kernels: every level of processor that this machine can run, and one thread or two."""

import random
from collections.abc import Iterator

import pytest
import torch
from kernel_levels import BY_TURNS, only_level, table_of, use_threads

from worker.kernels.cpu.operations import Table


@pytest.fixture(params=BY_TURNS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """A level with two threads, and random numbers that depend on nothing, or on the test's name alone."""
    torch.manual_seed(0)
    random.seed(request.node.name)
    use_threads(request.param, 2)
    yield request.param
    use_threads(request.param, 1)


@pytest.fixture(params=BY_TURNS)
def chosen_level(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers and models that choose kernels get those of one level."""
    with only_level(request.param):
        yield


@pytest.fixture
def table(level: str) -> Table:
    """All operations of the level."""
    return table_of(level)


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest, level: str) -> None:
    use_threads(level, request.param)
