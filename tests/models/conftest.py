from __future__ import annotations

import pytest

from models import ops
from worker.kernels import cpu


@pytest.fixture(autouse=True)
def reference() -> None:
    """Whatever a worker that other tests have opened in this process has bound."""
    ops.use({})


@pytest.fixture
def cpu_kernels(reference: None) -> None:
    """The operations that a worker binds on a CPU."""
    ops.use(cpu.TABLE)
