"""Experts by Triton, plain and quantized, against the reference in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpreted import DEVICE
from torch import Tensor

from models.ops import expert_routing_ops
from models.ops.grouped_matrix import Grouped, Matrix, widen
from worker.kernels.compare_with_reference import moved
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.operations import cuda_operations
from worker.kernels.cuda.products import experts as experts_module

OPERATIONS = cuda_operations(Card(90, 4))
EXPERTS, SIZE, INNER = 5, 96, 44
BF16, FP32 = torch.bfloat16, torch.float32


def grouped(outputs: int, inputs: int, bits: int = 4) -> Grouped:
    codes = torch.randint(1 << bits, (outputs, inputs), dtype=torch.uint8)
    groups = -(-inputs // 32)
    scales = (torch.rand(outputs, groups) + 0.5) / (1 << bits)
    zeros = torch.randint(4, 12, (outputs, groups), dtype=torch.uint8) << (bits - 4)
    return Grouped(codes, bits, 32, scales, zeros, inputs, BF16)


def drawn(form: str) -> tuple[list[Matrix], list[Matrix]]:
    """The matrices of all experts: gates with ups, and downs."""
    match form:
        case "plain":
            ups: list[Matrix] = [torch.randn(2 * INNER, SIZE) for _ in range(EXPERTS)]
            return ups, [torch.randn(SIZE, INNER) / 8 for _ in range(EXPERTS)]
        case "quantized":
            ups = [grouped(2 * INNER, SIZE) for _ in range(EXPERTS)]
            return ups, [grouped(SIZE, INNER) for _ in range(EXPERTS)]
        case _:  # one expert has other bits, and the downs of all have orders
            ups = [grouped(2 * INNER, SIZE, 8 if number == 2 else 4) for number in range(EXPERTS)]
            orders = [torch.randperm(INNER).int() for _ in range(EXPERTS)]
            return ups, [replace(grouped(SIZE, INNER), order=order) for order in orders]


def poisoned(matrix: Matrix) -> Matrix:
    """The same without numbers: nothing may be computed with it."""
    if isinstance(matrix, Grouped):
        return replace(matrix, scales=torch.full_like(matrix.scales, torch.nan))
    return torch.full_like(matrix, torch.nan)


def choices(tokens: int, chosen: int) -> tuple[Tensor, Tensor]:
    """No token chooses the expert 1, whose matrices and biases are NaN."""
    allowed = torch.tensor([0, 2, 3, 4])
    ids = torch.stack([allowed[torch.randperm(4)[:chosen]].sort().values for _ in range(tokens)])
    return ids.int(), torch.rand(tokens, chosen)


@pytest.mark.parametrize("form", ["plain", "quantized", "differing"])
@pytest.mark.parametrize("tokens", [1, 43])
def test_experts_are_those_of_the_reference(form: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_module, "_MOST_BYTES", 1 << 14)  # so the 43 tokens take two pieces or more,
    monkeypatch.setattr(experts_module, "_COLUMNS", 32)  # and their results, too
    dtype = FP32 if form == "plain" else BF16
    ups, downs = drawn(form)
    x, (ids, weights) = torch.randn(tokens, SIZE).to(dtype), choices(tokens, 3)
    biases = {"gate_up_bias": torch.randn(EXPERTS, 2 * INNER), "down_bias": torch.randn(EXPERTS, SIZE)}
    plain = [[widen(matrix).double() for matrix in matrices] for matrices in (ups, downs)]
    exact = {name: bias.double() for name, bias in biases.items()}
    expected = expert_routing_ops.experts(x.double(), ids, weights, *plain, "silu", **exact)
    for part in (ups, downs, *biases.values()):
        part[1] = torch.nan if isinstance(part, Tensor) else poisoned(part[1])
    packed = [
        OPERATIONS["collect_experts"]([parameter(matrix) for matrix in matrices]) for matrices in (ups, downs)
    ]
    given = {name: bias.to(dtype).to(DEVICE) for name, bias in biases.items()}
    for wide in (False, True):
        out = OPERATIONS["experts"](
            *(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE), *packed, "silu"), **given, wide=wide
        )
        assert out.dtype == (FP32 if wide else dtype)
        error = (out.cpu().double() - expected).norm() / expected.norm()
        assert error < (1e-5 if dtype == FP32 else 2**-5)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "clamped", "relu_squared"])
def test_experts_have_gates_or_none(kind: str) -> None:
    """The first matrices of experts without gates make as many numbers as the last ones take."""
    width = INNER if kind in expert_routing_ops.WITHOUT_GATES else 2 * INNER
    ups, downs = torch.randn(EXPERTS, width, SIZE) / 4, torch.randn(EXPERTS, SIZE, INNER) / 8
    biases = {"gate_up_bias": torch.randn(EXPERTS, width), "down_bias": torch.randn(EXPERTS, SIZE)}
    x, (ids, weights) = torch.randn(3, SIZE), choices(3, 2)
    exact = {name: bias.double() for name, bias in biases.items()}
    matrices = list(ups.double()), list(downs.double())
    expected = expert_routing_ops.experts(x.double(), ids, weights, *matrices, kind, **exact)
    packed = [OPERATIONS["collect_experts"]([parameter(matrix) for matrix in part]) for part in (ups, downs)]
    given = {name: bias.to(DEVICE) for name, bias in biases.items()}
    out = OPERATIONS["experts"](x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE), *packed, kind, **given)
    torch.testing.assert_close(out.cpu().double(), expected, atol=1e-5, rtol=1e-5)


def parameter(matrix: Matrix) -> Tensor:
    packed = OPERATIONS["pack"](moved(matrix, DEVICE))
    return (
        packed if isinstance(packed, torch.nn.Parameter) else torch.nn.Parameter(packed, requires_grad=False)
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what is never written may be anything, infinite too
def test_experts_of_other_ranks_add_nothing() -> None:
    ups, downs = drawn("plain")
    x, ids, weights = (
        torch.randn(2, SIZE),
        torch.tensor([[0, 7], [-1, 5]], dtype=torch.int32),
        torch.ones(2, 2),
    )
    packed = [
        OPERATIONS["collect_experts"]([parameter(matrix) for matrix in matrices]) for matrices in (ups, downs)
    ]
    out = OPERATIONS["experts"](x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE), *packed, "silu").cpu()
    alone = OPERATIONS["experts"](
        x[:1].to(DEVICE), ids[:1, :1].to(DEVICE), weights[:1, :1].to(DEVICE), *packed, "silu"
    )
    torch.testing.assert_close(out[:1], alone.cpu())
    places = torch.tensor([-1, -1, 0, 1, 2, 3, 4, -1, -1], dtype=torch.int32)
    named = torch.tensor([[2, 8], [0, 7]], dtype=torch.int32)
    moved = OPERATIONS["experts"](
        *(x.to(DEVICE), named.to(DEVICE), weights.to(DEVICE), *packed, "silu"), places=places.to(DEVICE)
    )
    assert torch.equal(moved.cpu(), out)
    assert torch.equal(out[1], torch.zeros(SIZE))


def test_packed_experts_stay_packed() -> None:
    matrices = [parameter(grouped(2 * INNER, SIZE)) for _ in range(EXPERTS)]
    before = sum(matrix.nbytes for matrix in matrices)
    collected = OPERATIONS["collect_experts"](matrices)
    assert sum(matrix.nbytes for matrix in collected) == before
    starts = [matrix.data_ptr() for matrix in matrices]
    assert starts == [starts[0] + number * matrices[0].nbytes for number in range(EXPERTS)]
