"""Quantized linear layers: their error beside the loaded matrix, and the C kernels against plain torch."""

from dataclasses import replace

import pytest
import torch
from kernel_levels import linear_table
from torch import Tensor, nn

from models.layers.linear import frozen
from models.ops import reference
from models.ops.grouped_matrix import Grouped
from worker.kernels.compare_with_reference import wrong
from worker.kernels.cpu import torch_operations
from worker.kernels.cpu.operations import Table
from worker.kernels.cpu.quantization import (
    HEAD,
    SCHEMES,
    Quantized,
    describe_savings,
    find_scheme,
    quantize,
)

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (31, 5), (32, 32), (33, 65), (70, 127), (100, 600)]
"""(outputs, inputs): less than a panel and a group, whole ones and a rest, odd and even inputs."""
ROWS = [1, 2, 3, 5, 6, 7, 12, 13, 31]
ERRORS = {"int8": 7e-3, "int8-dynamic": 1e-2, "int4": 9e-2}
"""Relative errors of products of normal numbers; half of them would be too strict."""


@pytest.fixture(params=SCHEMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def table(level: str, name: str) -> Table:
    return linear_table(level, name)


@pytest.fixture
def plain(name: str) -> Table:
    return torch_operations.linear_operations(SCHEMES[name])


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def assert_same_sums(out: Tensor, expected: Tensor) -> None:
    """Compare with room for another order of adding float32 numbers up."""
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_an_element_is_off_by_half_a_step_at_most() -> None:
    weight = torch.randn(50, 200) * torch.logspace(-3, 3, 50).unsqueeze(1)
    matrix = quantize(weight, SCHEMES["int8"])
    scales = matrix.scales
    assert (matrix.codes.shape, scales.shape) == ((50, 200), (50, 2))
    steps = scales.float().abs().repeat_interleave(128, dim=1)[:, :200]
    assert ((matrix.widened() - weight).abs() <= steps * 0.5001 + 1e-9).all()
    largest = torch.nn.functional.pad(weight, (0, 56)).unflatten(1, (2, 128)).abs().amax(-1)
    torch.testing.assert_close(scales.float().abs() * 127, largest, rtol=2**-8, atol=0)


def test_four_bits_have_a_small_error() -> None:
    torch.manual_seed(0)
    weight = torch.randn(200, 256)
    matrix = quantize(weight, SCHEMES["int4"])
    assert (matrix.codes.min(), matrix.codes.max()) == (0, 15)
    groups = weight.unflatten(1, (-1, 32))
    step = groups.abs().amax(-1, keepdim=True) / 7  # without a choice of scales
    plainly = relative_error(((groups / step).round() * step).flatten(1), weight)
    assert relative_error(matrix.widened(), weight) < 0.9 * plainly


def test_zeros_stay_zeros() -> None:
    for scheme in SCHEMES.values():
        assert not quantize(torch.zeros(3, 70), scheme).widened().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_near_those_of_the_loaded_matrix(table: Table, name: str, dtype: torch.dtype) -> None:
    weight, x = torch.randn(300, 600).to(dtype), torch.randn(9, 600).to(dtype)
    expected = reference.linear(x.double(), weight.double())
    error = relative_error(table["linear"](x, table["pack"](weight)).double(), expected)
    assert ERRORS[name] / 2 < error < ERRORS[name]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_the_kernels_compute_what_is_specified(
    table: Table, plain: Table, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    # Inputs have two sizes, or one scale for all groups would do.
    weight[:, inputs // 2 :] *= 40
    packed, specified = table["pack"](weight), plain["pack"](weight)
    for rows in ROWS:
        x = torch.randn(rows, inputs).to(dtype)
        x[:, inputs // 2 :] /= 7
        for added in (None, bias):
            expected = plain["linear"](x, specified, added)
            out = table["linear"](x, packed, added)
            assert out.dtype == dtype
            if dtype == torch.float32:
                assert_same_sums(out, expected)
            else:
                torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "relu_squared"])
def test_activations_and_gates_follow(table: Table, plain: Table, kind: str) -> None:
    weight, bias, x = torch.randn(90, 65), torch.randn(90), torch.randn(14, 65)
    specified = plain["pack"](weight)
    assert_same_sums(
        table["linear"](x, table["pack"](weight), bias, kind=kind),
        plain["linear"](x, specified, bias, kind=kind),
    )
    gated = table["pack"](weight, gated=True)
    for added in (None, bias):
        assert_same_sums(
            table["gated_linear"](x, gated, added, kind), plain["gated_linear"](x, specified, added, kind)
        )


def test_rows_of_any_size(table: Table, plain: Table) -> None:
    weight, x = torch.randn(40, 33), torch.randn(3, 33)
    packed = table["pack"](weight)
    assert not table["linear"](torch.zeros(2, 33), packed).any()
    scales = torch.tensor([[1e-35], [1e-20], [1e20]])
    expected = plain["linear"](x, plain["pack"](weight)) * scales
    out = table["linear"](x * scales, packed)
    assert_same_sums(out[1:] / scales[1:], expected[1:] / scales[1:])
    assert out[0].abs().max() < 1e-33


def test_a_head_has_eight_bits_in_every_mode(table: Table, plain: Table) -> None:
    weight, x = torch.randn(70, 65), torch.randn(3, 65)
    head = table["linear"](x, table["pack"](weight, wide=True), wide=True)
    assert head.dtype == torch.float32
    assert relative_error(head, reference.linear(x, weight)) < ERRORS["int8"]
    assert_same_sums(head, plain["linear"](x, plain["pack"](weight, wide=True), wide=True))
    assert_same_sums(head, plain["linear"](x, Quantized.of(weight, HEAD), wide=True))


def test_memory_is_saved(table: Table, plain: Table, name: str) -> None:
    weight = torch.randn(96, 640).bfloat16()
    share = {"int8": 1 / 2 + 1 / 128, "int8-dynamic": 1 / 2 + 1 / 128, "int4": 1 / 4 + 1 / 32}[name]
    layer = nn.Module()
    for packed in (table["pack"](weight), plain["pack"](weight)):
        layer.weight = frozen(packed)
        assert [parameter.nbytes for parameter in layer.parameters()] == [weight.nbytes * share]
        kept = [nn.Parameter(torch.empty(2 << 20)), packed]
        assert describe_savings(name, kept).startswith(f"quantization {name}: 8 MiB of weights became 8 MiB")


def test_matrices_of_eight_bits_are_quantized_anew(table: Table, name: str) -> None:
    """They become what their plain numbers would become, whatever their groups."""
    one = Grouped(
        codes=torch.randint(0, 256, (40, 130), dtype=torch.uint8),
        bits=8,
        group=64,
        scales=torch.rand(40, 3).half(),
        offsets=torch.randint(0, 256, (40, 3), dtype=torch.uint8),
        inputs=130,
        dtype=torch.float32,
    )
    other = replace(one, group=0, scales=one.scales[:, :1], offsets=None)
    x = torch.randn(3, 130)
    for parts in ([one], [one, other]):
        expected = table["linear"](x, table["pack"](*(part.widened() for part in parts)))
        packed = table["pack"](*parts)
        assert packed.bytes_before == sum(part.plain_bytes for part in parts)
        assert torch.equal(table["linear"](x, packed), expected)
    half = replace(one, dtype=torch.float16)
    torch.testing.assert_close(
        table["linear"](x.half(), table["pack"](half)),
        table["linear"](x.half(), table["pack"](half.widened())),
    )


def test_a_model_without_our_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="leave the option out"):
        describe_savings("int8", [nn.Parameter(torch.empty(3))])


def test_float16_is_computed_by_torch(table: Table, name: str) -> None:
    weight, bias, x = torch.randn(40, 133).half(), torch.randn(40).half(), torch.randn(5, 133).half()
    out = table["linear"](x, table["pack"](weight), bias)
    assert out.dtype == torch.float16
    assert (
        relative_error(out.float(), reference.linear(x.float(), weight.float(), bias.float())) < ERRORS[name]
    )
    gated = table["gated_linear"](x, table["pack"](weight, gated=True), bias, "silu")
    expected = reference.gated_linear(x.float(), weight.float(), bias.float(), "silu")
    assert relative_error(gated.float(), expected) < 2 * ERRORS[name]


def test_the_check_at_start_distinguishes_schemes(table: Table, plain: Table, name: str) -> None:
    assert wrong(table, plain) == []
    for other in SCHEMES.keys() - {name}:
        found = wrong(table, torch_operations.linear_operations(SCHEMES[other]))
        assert found == ["experts", "gated_linear", "linear"] or {name, other} == {"int8", "int8-dynamic"}


def test_an_unknown_scheme_names_the_known() -> None:
    with pytest.raises(ValueError, match="'fp8': choose one of int8, int8-dynamic, int4"):
        find_scheme("fp8")
