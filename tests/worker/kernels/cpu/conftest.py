"""A fixture: the level of processor, for tests that draw shapes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from kernel_levels import NAMES, use_threads


@pytest.fixture(params=NAMES)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """A level of processor, and random shapes that depend on the test's name alone."""
    torch.manual_seed(0)
    random.seed(request.node.name)
    use_threads(request.param, 1)
    yield request.param
    use_threads(request.param, 1)
