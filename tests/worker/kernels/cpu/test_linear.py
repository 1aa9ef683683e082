"""Linear layers of the C kernels against float64, for every kind of processor that this machine can run."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from models.layers.linear import frozen
from models.ops import reference
from worker.kernels.cpu.operations import Table

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (31, 2), (32, 16), (33, 65), (70, 127), (100, 600)]
"""(outputs, inputs): less than a panel, whole panels and a rest, odd and even inputs."""
ROWS = [1, 2, 3, 5, 12, 13, 31, 32, 33, 64]


pytestmark = pytest.mark.usefixtures("threads")


def exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return reference.linear(x.double(), weight.double(), None if bias is None else bias.double())


def assert_near(out: Tensor, expected: Tensor, scale: float) -> None:
    """Compare in float32, without the last digits, which are lost in sums of numbers of this size."""
    torch.testing.assert_close(out.double(), expected, rtol=2e-6, atol=2e-6 * scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_sums_are_right_to_float32(table: Table, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    packed = table["pack"](weight)
    for rows in ROWS:
        x = torch.randn(rows, inputs).to(dtype)
        for added in (None, bias):
            out = table["linear"](x, packed, added, wide=True)
            assert out.dtype == torch.float32
            assert_near(out, exact(x, weight, added), scale=inputs**0.5)


def test_the_result_is_the_sum_rounded_once(table: Table) -> None:
    weight, x = torch.randn(70, 65).bfloat16(), torch.randn(17, 65).bfloat16()
    packed = table["pack"](weight)
    assert torch.equal(table["linear"](x, packed), table["linear"](x, packed, wide=True).bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "relu_squared"])
def test_activations_and_gates_follow(table: Table, dtype: torch.dtype, kind: str) -> None:
    weight, bias, x = (torch.randn(*shape).to(dtype) for shape in ((90, 65), (90,), (14, 65)))
    sums = exact(x, weight, bias)
    gate, up = sums.chunk(2, dim=-1)
    out = table["linear"](x, table["pack"](weight), bias, kind=kind)
    gated = table["gated_linear"](x, table["pack"](weight, gated=True), bias, kind)
    bare = table["gated_linear"](x, table["pack"](weight, gated=True), None, kind)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    activated, product = reference.activation(sums, kind), reference.activation(gate, kind) * up
    torch.testing.assert_close(out.double(), activated, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gated.double(), product, rtol=tolerance, atol=4 * tolerance)
    gate, up = exact(x, weight).chunk(2, dim=-1)
    product = reference.activation(gate, kind) * up
    torch.testing.assert_close(bare.double(), product, rtol=tolerance, atol=4 * tolerance)


def test_what_does_not_fit_is_refused(table: Table) -> None:
    packed = table["pack"](torch.randn(40, 33))
    with pytest.raises(ValueError, match=r"\[T, 34\].*33 inputs"):
        table["linear"](torch.randn(2, 34), packed)
    with pytest.raises(ValueError, match="bfloat16 does not fit"):
        table["linear"](torch.randn(2, 33).bfloat16(), packed)


def test_a_packed_matrix_is_a_parameter(table: Table) -> None:
    weight = torch.randn(96, 64)
    layer = nn.Module()
    layer.weight = frozen(table["pack"](weight))
    assert [parameter.nbytes for parameter in layer.parameters()] == [weight.nbytes]
    assert layer.weight.data_ptr() % 64 == 0


def test_float16_is_left_to_torch(table: Table) -> None:
    weight, x = torch.randn(40, 33).half(), torch.randn(5, 33).half()
    assert table["pack"](weight) is weight
    assert torch.equal(table["linear"](x, weight), reference.linear(x, weight))
    gated = table["gated_linear"](x, table["pack"](weight, gated=True), None, "silu")
    assert torch.equal(gated, reference.gated_linear(x, weight, None, "silu"))


def test_several_callers_do_not_disturb_each_other(table: Table) -> None:
    packed = table["pack"](torch.randn(200, 300))
    inputs = [torch.randn(rows, 300) for rows in (1, 9, 40, 200) * 4]
    expected = [table["linear"](x, packed) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            found = list(pool.map(lambda x: table["linear"](x, packed), inputs))
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
