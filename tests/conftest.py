"""What tests of all packages share."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for sockets, the length of whose names is bounded; the name of `tmp_path` can be too long."""
    with tempfile.TemporaryDirectory(prefix="facet-test-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True, scope="module")
def _keep_threads() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """A device that a test opens sets torch's threads; tests of other modules get those that there were."""
    torch = sys.modules.get("torch")  # the tests of clients run without it
    before = torch.get_num_threads() if torch else 0
    yield
    if torch:
        torch.set_num_threads(before)
