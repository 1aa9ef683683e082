"""What is computed on a card to prove its kernels."""

import torch
from interpreted import DEVICE  # noqa: F401  # before any kernel is imported
from torch._subclasses.fake_tensor import FakeTensorMode

from models.ops import SPECIFIED
from worker.kernels.cuda.kernel_self_test import cases_on


def test_the_reference_of_adapters_is_computed_on_the_card() -> None:
    """Tensors without memory are no tensors of the CPU, and are not multiplied by these."""
    card = torch.device("meta")
    with FakeTensorMode():
        [case] = [case for case in cases_on(card, 40, torch.bfloat16) if case.name == "lora"]
        assert case.compute(SPECIFIED).device == card
