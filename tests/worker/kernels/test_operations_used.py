"""What a model asks of operations, and which cases prove it."""

import torch

from worker.kernels.cuda.kernel_self_test import cases_on
from worker.kernels.operations_used import Uses

CPU = torch.device("cpu")


def test_each_operation_of_a_card_is_proved_for_a_model_that_calls_it() -> None:
    for name in {case.name for case in cases_on(CPU, 40, torch.bfloat16)}:
        uses = Uses()
        uses.noting({name: lambda: None})[name]()
        assert {case.name for case in cases_on(CPU, 40, torch.bfloat16, uses)} == {name}
