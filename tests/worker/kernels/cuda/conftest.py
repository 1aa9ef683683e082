"""What tests of CUDA's kernels share: the same random numbers, and a device of which steps are replayed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from interpreted_device import Interpreted


@pytest.fixture(autouse=True)
def _seed() -> None:  # pyright: ignore[reportUnusedFunction]
    torch.manual_seed(0)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interpreted]:
    """The device that the next workers open."""
    from interpreted_device import Interpreted  # skips the test where Triton is not installed

    from models import ops
    from worker import runner

    device = Interpreted(most_tokens=3)

    def open_device(_: object) -> Interpreted:
        ops.use(device.kernels)
        return device

    monkeypatch.setattr(runner, "open_device", open_device)
    yield device
    ops.use({})
