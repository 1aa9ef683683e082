"""Memory for the results of kernels."""

from __future__ import annotations

import torch

from worker.kernels.cpu.recording.outputs import Memory, allocated_by, empty


def test_memory_is_used_again_when_no_view_of_it_is_left() -> None:
    memory = Memory(torch.zeros(256, dtype=torch.uint8))
    first, second = memory.take(100), memory.take(128)
    assert first is not None and second is not None
    assert memory.take(1) is None
    place, view = first.data_ptr(), first.view(torch.float32)[:3]
    del first
    assert memory.take(100) is None
    del view
    again = memory.take(90)  # as many pieces of 64 bytes
    assert again is not None
    assert again.data_ptr() == place


def test_memory_is_allocated_as_asked() -> None:
    made = torch.zeros(6)
    with allocated_by(lambda shape, dtype: made.view(*shape).to(dtype)):
        assert empty((2, 3), torch.float32).data_ptr() == made.data_ptr()
    fresh = empty((2, 3), torch.bfloat16)
    assert (fresh.shape, fresh.dtype) == ((2, 3), torch.bfloat16)
