"""What tests of all packages share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for sockets, the length of whose names is bounded; the name of `tmp_path` can be too long."""
    with tempfile.TemporaryDirectory(prefix="facet-test-", dir="/tmp") as folder:
        yield Path(folder)
