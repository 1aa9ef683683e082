"""The store of hidden states."""

from __future__ import annotations

import torch

from models.context import ForwardContext
from worker.devices.cpu import Cpu
from worker.pooling.hidden import HiddenStore


def test_a_store_keeps_what_was_written_in_its_dtype() -> None:
    store = HiddenStore(4, 2, 3, torch.bfloat16, Cpu(1).allocate)
    context = ForwardContext(*[torch.empty(0)] * 4, torch.tensor([9, 2]), 2, [2], [2])
    store.write(torch.tensor([[1.0, 2, 3], [4, 5, 6]]), context)
    table = torch.tensor([[0, 0], [1, 4]], dtype=torch.int32)
    rows = store.read(table, torch.tensor([1, 1]), torch.tensor([0, 3]))
    assert rows.tolist() == [[4, 5, 6], [1, 2, 3]]
    assert rows.dtype == torch.bfloat16
