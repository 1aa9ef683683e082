"""Tensors that are equal in every bit."""

import torch
from torch import Tensor


def assert_same_bits(one: Tensor, other: Tensor) -> None:
    """-0 and 0 differ."""
    whole = torch.int16 if one.dtype == torch.bfloat16 else torch.int32
    assert one.isfinite().all()
    assert torch.equal(one.view(whole), other.view(whole))
