"""The number of threads that tests of encoders run with."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """One thread, and three, which cut every tensor at odd places."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
