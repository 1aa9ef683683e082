"""Products with quantized matrices by Triton, against the numbers that the codes mean in float64."""

from dataclasses import replace

import pytest
import torch
from interpreted import DEVICE
from torch import Tensor
from torch.nn import functional as F

from models.ops import reference
from models.ops.grouped_matrix import Factors, Grouped, Matrix
from models.weight_coding import E2M1, E4M3, IQ4, WHOLE
from worker.kernels.compare_with_reference import moved
from worker.kernels.cuda.capabilities import MANY_ROWS, Card
from worker.kernels.cuda.operations import cuda_operations
from worker.kernels.cuda.products import packing
from worker.kernels.cuda.products.quantized import splits_of

CARD = Card(90, 4)
OPERATIONS = cuda_operations(CARD)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OUTPUTS = 101
TOLERANCE = {BF16: 2**-6, FP16: 2**-8, FP32: 1e-5}


def grouped(
    bits: int, group: int, inputs: int, dtype: torch.dtype = BF16, *, offsets: bool = False, kind: str = WHOLE
) -> Grouped:
    """A matrix whose first rows hold every code."""
    codes = torch.randint(1 << bits, (OUTPUTS, inputs))
    codes.view(-1)[: 1 << bits] = torch.arange(1 << bits)
    if kind == E4M3:
        codes[(codes & 127) == 127] = 0
    groups = -(-inputs // group) if group else 1
    zeros = torch.randint(1 << bits, (OUTPUTS, groups), dtype=torch.uint8)
    zeros.view(-1)[:2] = torch.tensor([0, (1 << bits) - 1], dtype=torch.uint8)
    return Grouped(
        codes=codes.to(torch.uint8),
        bits=bits,
        group=group,
        scales=((torch.rand(OUTPUTS, groups) + 0.5) / (1 << bits)).half(),
        offsets=zeros if offsets else None,
        inputs=inputs,
        dtype=dtype,
        kind=kind,
    )


def two_level(bits: int, kind: str, *, minimums: bool, group: int = 32) -> Grouped:
    whole = torch.randint(64, (2, OUTPUTS, 224 // group), dtype=torch.uint8)
    factors = (torch.rand(2, OUTPUTS, 2) / (64 << bits)).half()
    form = replace(grouped(bits, group, 224, kind=kind), scales=whole[0])
    run = 128 // group
    if not minimums:
        return replace(form, factors=Factors(run, factors[0]))
    return replace(form, minimums=whole[1], factors=Factors(run, *factors))


def powers(matrix: Grouped) -> Grouped:
    exponents = torch.randint(118, 126, matrix.scales.shape, dtype=torch.uint8)
    return replace(matrix, scales=exponents.view(torch.float8_e8m0fnu))


def disordered(matrix: Grouped, inputs: int) -> Grouped:
    """Columns in another order, some of which stand for no input."""
    columns = matrix.codes.shape[1]
    order = torch.full((columns,), -1)
    order[torch.randperm(columns)[:inputs]] = torch.randperm(inputs)
    return replace(matrix, order=order.int(), inputs=inputs)


def forms() -> dict[str, Grouped]:
    torch.manual_seed(1)
    return {
        "4 bits in groups of 32": grouped(4, 32, 224),
        "4 bits in groups of 64, float16": grouped(4, 64, 300, FP16),
        "4 bits in groups of 128, zero points": grouped(4, 128, 300, offsets=True),
        "4 bits in groups of 256, float32": replace(grouped(4, 256, 520, FP32), dtype=FP32),
        "4 bits, a scale for a row": replace(grouped(4, 0, 143), scales=torch.rand(OUTPUTS, 1)),
        "4 bits in groups of 16": grouped(4, 16, 100, offsets=True),
        "4 bits in groups of 96": grouped(4, 96, 300),
        "5 bits": two_level(5, WHOLE, minimums=True),
        "6 bits in groups of 16": two_level(6, WHOLE, minimums=False, group=16),
        "8 bits in groups of 128": grouped(8, 128, 300),
        "8 bits in groups of 32, zero points": grouped(8, 32, 77, offsets=True),
        "8 bits, a scale for a row": grouped(8, 0, 143),
        "e4m3 in groups of 128": grouped(8, 128, 300, kind=E4M3),
        "e4m3, float32": grouped(8, 0, 143, FP32, kind=E4M3),
        "e2m1 with powers of 2": powers(grouped(4, 32, 96, kind=E2M1)),
        "e2m1 in groups of 16": replace(grouped(4, 16, 112, kind=E2M1), scales=torch.rand(OUTPUTS, 7)),
        "IQ4 in two levels": two_level(4, IQ4, minimums=False),
        "4 bits in two levels with minimums": two_level(4, WHOLE, minimums=True),
        "another order": disordered(grouped(4, 32, 96), 96),
        "columns of no input": disordered(grouped(8, 16, 96, offsets=True), 83),
    }


def exact(x: Tensor, matrix: Matrix) -> Tensor:
    plain = matrix.widened(torch.float64) if isinstance(matrix, Grouped) else matrix.double()
    return x.double() @ plain.t()


def torch_reads_beside() -> bool:
    """Whether torch's products read what lies beside rows: on AMX, if inputs are no multiple of 32."""
    held = torch.full((MANY_ROWS, 105), float("nan"), dtype=BF16)
    held[:, :100] = 0
    return bool(F.linear(held[:, :100], torch.ones(OUTPUTS, 100, dtype=BF16)).isnan().any())


def inputs_of(rows: int, matrix: Grouped) -> Tensor:
    """Rows in a wider tensor that is NaN beside them, but where torch multiplies them and would read it."""
    beside = 0.0 if rows >= MANY_ROWS and torch_reads_beside() else float("nan")
    held = torch.full((rows, matrix.inputs + 5), beside, dtype=matrix.dtype)
    held[:, : matrix.inputs] = torch.randn(rows, matrix.inputs)
    return held[:, : matrix.inputs]


def assert_close(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = (out.double().cpu() - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype], error


@pytest.mark.parametrize("name", forms())
def test_products_are_those_of_the_numbers(name: str) -> None:
    matrix = forms()[name]
    packed = OPERATIONS["pack"](moved(matrix, DEVICE))
    assert type(packed) is packing.Packed
    assert packed.bytes_before == OUTPUTS * matrix.inputs * matrix.dtype.itemsize
    for rows in (1, 19, 130):
        x = inputs_of(rows, matrix)
        expected = exact(x, matrix)
        out = OPERATIONS["linear"](x.to(DEVICE), packed)
        assert out.dtype == matrix.dtype
        assert_close(out, expected, matrix.dtype)
    wide = OPERATIONS["linear"](x[:3].to(DEVICE), packed, wide=True)
    assert wide.dtype == FP32
    assert_close(wide, expected[:3], FP32)


def test_inputs_are_split_where_outputs_are_few() -> None:
    matrix = grouped(4, 32, 1111)
    packed = OPERATIONS["pack"](moved(matrix, DEVICE))
    x, bias = inputs_of(5, matrix), torch.randn(OUTPUTS).to(BF16)
    assert splits_of(packed, 64, CARD.processors) == 2
    out = OPERATIONS["linear"](x.to(DEVICE), packed, bias.to(DEVICE), wide=True)
    assert_close(out, exact(x, matrix) + bias.double(), FP32)


@pytest.mark.parametrize("rows", [3, 130])
def test_gates_and_activations_follow(rows: int) -> None:
    matrix = grouped(4, 32, 96, FP32)
    parts = [matrix.rows(0, 50), matrix.rows(50, 100)]
    x, bias = inputs_of(rows, matrix), torch.randn(100)
    packed = OPERATIONS["pack"](*(moved(part, DEVICE) for part in parts), gated=True)
    plain = matrix.rows(0, 100).widened()
    out = OPERATIONS["gated_linear"](x.to(DEVICE), packed, bias.to(DEVICE), "silu")
    assert_close(out, reference.gated_linear(x, plain, bias, "silu").double(), FP32)
    out = OPERATIONS["linear"](x.to(DEVICE), packed, bias.to(DEVICE), kind="gelu")
    assert_close(out, reference.linear(x, plain, bias, kind="gelu").double(), FP32)


def test_parts_may_differ_in_form() -> None:
    """Where the value has 8 bits and the query 4, or one is plain, none is widened."""
    parts: list[Matrix] = [grouped(4, 32, 96), torch.randn(7, 96).to(BF16), grouped(8, 32, 96)]
    packed = OPERATIONS["pack"](*(moved(part, DEVICE) for part in parts))
    assert packed.bytes_before == 2 * 96 * (OUTPUTS + 7 + OUTPUTS)
    assert packed.nbytes < packed.bytes_before
    x, bias = inputs_of(3, grouped(4, 32, 96)), torch.randn(2 * OUTPUTS + 7).to(BF16)
    expected = torch.cat([exact(x, part) for part in parts], dim=1) + bias.double()
    assert_close(OPERATIONS["linear"](x.to(DEVICE), packed, bias.to(DEVICE)), expected, BF16)


def test_every_code_of_8_bits_is_widened_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    matrix = Grouped(codes, 8, 128, torch.ones(2, 1), None, 128, FP32, kind=E4M3)
    out = OPERATIONS["embed"](torch.tensor([1, 0, 1]).to(DEVICE), OPERATIONS["pack"](moved(matrix, DEVICE)))
    expected = codes.view(torch.float8_e4m3fn).float()[[1, 0, 1]]
    assert torch.equal(out.cpu().nan_to_num(1e9), expected.nan_to_num(1e9))


@pytest.mark.parametrize("kind", [E4M3, E2M1])
def test_every_code_of_floats_is_multiplied_exactly(kind: str) -> None:
    """Products with rows of the identity are the numbers themselves."""
    bits = 8 if kind == E4M3 else 4
    codes = (torch.arange(128 * OUTPUTS).view(OUTPUTS, 128) % (1 << bits)).to(torch.uint8)
    codes[(codes & 127) == 127] = 0
    matrix = Grouped(codes, bits, 128, torch.ones(OUTPUTS, 1), None, 128, BF16, kind=kind)
    packed = OPERATIONS["pack"](moved(matrix, DEVICE))
    out = OPERATIONS["linear"](torch.eye(128, dtype=BF16)[:100].to(DEVICE), packed)
    assert torch.equal(out.cpu(), matrix.widened()[:, :100].t())
    matrix.codes[5, 7] = 127
    if kind == E4M3:
        packed = OPERATIONS["pack"](moved(matrix, DEVICE))
        out = OPERATIONS["linear"](torch.ones(1, 128, dtype=BF16, device=DEVICE), packed)
        assert out.isnan().nonzero().tolist() == [[0, 5]]


@pytest.mark.parametrize("name", ["IQ4 in two levels", "4 bits in two levels with minimums", "5 bits"])
def test_embeddings_are_widened_row_by_row(name: str) -> None:
    matrix = forms()[name]
    packed = OPERATIONS["pack"](moved(matrix, DEVICE), wide=True)
    ids = torch.tensor([7, OUTPUTS - 1, 0, 7])
    out = OPERATIONS["embed"](ids.to(DEVICE), packed)
    torch.testing.assert_close(out.cpu(), matrix.widened()[ids], atol=0, rtol=2**-7)
    assert OPERATIONS["embed"](ids[:0].to(DEVICE), packed).shape == (0, 224)


def test_groups_that_no_tile_fits_are_widened(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    matrix = grouped(8, 24, 96)
    packed = OPERATIONS["pack"](moved(matrix, DEVICE))
    assert torch.equal(packed.cpu(), matrix.widened())
    assert "codes of 8 bits (whole) in groups of 24 are widened" in caplog.text


def test_inputs_of_another_type_are_refused() -> None:
    packed = OPERATIONS["pack"](moved(grouped(8, 32, 96), DEVICE))
    with pytest.raises(ValueError, match=r"float32 do not fit a matrix that was packed for torch\.bfloat16"):
        OPERATIONS["linear"](torch.zeros(1, 96, device=DEVICE), packed)


def test_plain_matrices_become_fp8_on_loading() -> None:
    pack = cuda_operations(CARD, fp8=True)["pack"]
    weight = torch.randn(OUTPUTS, 96).to(BF16)
    weight[3] = 0
    packed = pack(weight[:50].to(DEVICE), weight[50:].to(DEVICE))
    assert (packed.bytes_before, packed.outputs) == (weight.nbytes, OUTPUTS)
    assert packed.nbytes < 0.7 * weight.nbytes
    x = inputs_of(3, grouped(8, 32, 96))
    error = OPERATIONS["linear"](x.to(DEVICE), packed).cpu().double() - x.double() @ weight.double().t()
    assert 0 < error.norm() / (x.double() @ weight.double().t()).norm() < 0.05
    for option in ("wide", "plain"):
        assert torch.equal(pack(weight.to(DEVICE), **{option: True}).cpu(), weight)
