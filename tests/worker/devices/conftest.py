"""A device that is opened sets torch's threads, for all tests that come after."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
