"""All forms of quantized matrices: what computes with them, against exact products in float64."""

import logging
from dataclasses import replace

import pytest
import torch
from forms import E4M3_CODES as CODES
from forms import FORMS, Shape, drawn_e4m3
from kernel_levels import linear_table
from torch import Tensor

from models.ops import reference
from models.ops.grouped_matrix import Grouped
from models.ops.tree_sum import add_in_pairs
from models.weight_coding import E2M1, E4M3, FP4, IQ4, LEVELS, NF4
from worker.kernels.cpu import torch_operations
from worker.kernels.cpu.operations import Table
from worker.kernels.cpu.packing import Packed
from worker.kernels.cpu.quantization import Quantized

PLAIN = torch_operations.linear_operations(None)


def exact(x: Tensor, matrix: Grouped) -> Tensor:
    """The product in float64, of the inputs as they are."""
    return reference.linear(x.double(), matrix.widened(torch.float64)).float()


def assert_near(out: Tensor, expected: Tensor) -> None:
    """Inputs of 16 bits are as good as exact ones."""
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-4 * expected.abs().max().item())


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("sections", [None, 1, 2, 8])
def test_plain_torch_computes_with_the_numbers_as_they_are(name: str, sections: int | None) -> None:
    torch.manual_seed(0)
    matrix, x = FORMS[name](Shape(70, 720)), torch.randn(3, 720)
    packed = PLAIN["pack"](matrix, sections=sections)
    assert isinstance(packed, Quantized)
    assert_near(PLAIN["linear"](x, packed), exact(x, matrix))


@pytest.fixture
def table(level: str) -> Table:
    return linear_table(level)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("sections", [None, 8])
def test_the_kernels_compute_what_is_specified(table: Table, name: str, sections: int | None) -> None:
    """Inputs of 8 bits are rounded as plain torch rounds them; 704 inputs leave a rest everywhere."""
    for dtype, input_bits in ((torch.float32, 16), (torch.bfloat16, 8)):
        matrix = FORMS[name](Shape(70, 704, dtype, input_bits))
        packed, specified = (each["pack"](matrix, sections=sections) for each in (table, PLAIN))
        assert isinstance(packed, Packed)
        for rows in (1, 6, 13):
            x = torch.randn(rows, 704).to(dtype)
            out = table["linear"](x, packed, wide=True)
            expected = PLAIN["linear"](x, specified, wide=True)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
            if input_bits == 16:
                assert_near(out, exact(x, matrix))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q5_0", "Q5_K", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("code", ["least", "greatest"])
def test_the_largest_sums_of_bytes_fit(table: Table, name: str, code: str) -> None:
    """Instructions that add up products of bytes in 16 bits would cut what is too large for these."""
    matrix = FORMS[name](Shape(40, 512, torch.bfloat16, input_bits=8))
    matrix = replace(
        matrix, codes=torch.full_like(matrix.codes, (1 << matrix.bits) - 1 if code == "greatest" else 0)
    )
    packed, specified = table["pack"](matrix), PLAIN["pack"](matrix)
    for rows in (1, 5, 13):
        x = torch.tensor([1.0, -1.0]).repeat_interleave(256).expand(rows, -1).bfloat16()
        out, expected = table["linear"](x, packed, wide=True), PLAIN["linear"](x, specified, wide=True)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("kind", [E2M1, IQ4, NF4, FP4])
def test_every_code_of_four_bits_is_exact(table: Table, kind: str) -> None:
    """A 1 becomes 32639 and a scale when inputs are rounded, whose product may be off by the last digit."""
    codes = torch.arange(16, dtype=torch.uint8).expand(5, 16)
    matrix = Grouped(codes, 4, 16, torch.ones(5, 1), None, 16, torch.float32, kind=kind)
    found = table["linear"](torch.eye(16), table["pack"](matrix))
    torch.testing.assert_close(
        found[:, 3], torch.tensor(LEVELS[kind], dtype=torch.float32), rtol=3e-7, atol=0
    )


def test_the_least_powers_of_two_are_exact(table: Table) -> None:
    """2^-127 has no leading 1 in float32; E2M1 needs half of it."""
    scales = torch.arange(4, dtype=torch.uint8).unsqueeze(1).view(torch.float8_e8m0fnu)
    codes = torch.full((4, 32), 7, dtype=torch.uint8)
    matrix = Grouped(codes, 4, 32, scales, None, 32, torch.float32, kind=E2M1)
    x = torch.zeros(1, 32)
    x[0, 5] = 2.0**100
    expected = torch.tensor([[6 * 2.0 ** (code - 27) for code in range(4)]])
    torch.testing.assert_close(table["linear"](x, table["pack"](matrix)), expected, rtol=3e-7, atol=0)


@pytest.mark.parametrize(
    ("name", "most"), [("Q4_K", 4.7), ("Q5_K", 5.7), ("Q6_K", 6.6), ("mxfp4", 4.3), ("nf4", 4.6)]
)
def test_memory_is_that_of_the_file(table: Table, name: str, most: float) -> None:
    """A matrix takes so many bits for each element: at most 3 % more than GGUF's blocks."""
    packed = table["pack"](FORMS[name](Shape(320, 1024)))
    assert packed.nbytes * 8 / (320 * 1024) < most


def test_codes_of_five_bits_become_bytes_in_small_groups(
    table: Table, caplog: pytest.LogCaptureFixture
) -> None:
    """Sections of 48 inputs cut groups of 32 to 16, and units of 5 bits have 32. The log says so once."""
    caplog.set_level(logging.INFO)
    matrix, x = FORMS["Q5_K"](Shape(40, 8 * 48)), torch.randn(3, 8 * 48)
    packed, _ = table["pack"](matrix, sections=8), table["pack"](matrix, sections=8)
    told = [message for message in caplog.messages if message.startswith("codes of 5 bits")]
    assert told == ["codes of 5 bits take 8 where groups have 16 inputs: kernels read them in units of 32"]
    assert isinstance(packed, Packed)
    assert_near(table["linear"](x, packed), exact(x, matrix))


# Numbers in e4m3: every code, sums in one order, and the kernels against exact products.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_is_exact(table: Table, dtype: torch.dtype) -> None:
    """Also those without a leading 1, the smallest of which is 2^-9."""
    codes = torch.tensor([CODES], dtype=torch.uint8)
    matrix = Grouped(codes, 8, 0, torch.ones(1, 1), None, len(CODES), dtype, kind=E4M3)
    found = table["linear"](torch.eye(len(CODES), dtype=dtype), table["pack"](matrix), wide=True)
    assert torch.equal(found[:, 0], codes[0].view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("group", [32, 128, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_exact_up_to_the_sum(table: Table, group: int, dtype: torch.dtype) -> None:
    matrix = drawn_e4m3(70, 333, group, dtype)
    packed, specified = table["pack"](matrix), PLAIN["pack"](matrix)
    assert isinstance(packed, Packed)
    assert isinstance(specified, Quantized)
    for rows in (1, 3, 5, 12, 13, 300):
        x = torch.randn(rows, 333).to(dtype)
        expected = exact(x, matrix)
        for out in (table["linear"](x, packed, wide=True), torch_operations.linear(x, specified, wide=True)):
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
        alone = torch.cat([table["linear"](row, packed, wide=True) for row in x.split(1)])
        assert torch.equal(table["linear"](x, packed, wide=True), alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sections_are_added_up_as_ranks_do(table: Table, dtype: torch.dtype) -> None:
    matrix, x = drawn_e4m3(40, 8 * 48, group=0, dtype=dtype), torch.randn(5, 8 * 48).to(dtype)
    whole = table["linear"](x, table["pack"](matrix, sections=8), wide=True)
    halves = [
        table["linear"](piece, table["pack"](half, sections=4), wide=True)
        for piece, half in zip(x.chunk(2, dim=1), _halves(matrix), strict=True)
    ]
    assert torch.equal(add_in_pairs(halves), whole)


def _halves(matrix: Grouped) -> list[Grouped]:
    pieces = matrix.codes.chunk(2, dim=1)
    width = matrix.inputs // 2
    return [Grouped(piece, 8, 0, matrix.scales, None, width, matrix.dtype, kind=E4M3) for piece in pieces]
