"""The tokens of the last steps, of totals that only grow."""

from __future__ import annotations

import pytest
import torch

from worker.experts.window import LoadWindow


@pytest.mark.parametrize(("size", "most"), [(1, 1), (4, 4), (8, 8), (9, 11), (20, 23), (80, 89)])
def test_a_window_holds_its_last_steps_and_one_part_more_at_most(size: int, most: int) -> None:
    totals = torch.zeros(2, 3, dtype=torch.int64)
    window = LoadWindow(totals, size)
    for step in range(4 * size):
        window.advance()
        held = int(window.loads()[0, 0])
        assert min(step, size) <= held <= most
        assert window.loads().tolist() == [[held, 2 * held, 0]] * 2
        totals += torch.tensor([1, 2, 0])
