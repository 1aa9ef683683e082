"""A product over inputs that are cut over ranks has the same bits for 1, 2, 4 and 8 of them."""

from collections.abc import Iterator

import pytest
import torch
from kernel_levels import BY_TURNS, NAMES, linear_table, table_of, use_threads
from torch import Tensor

from models.ops import reference
from models.ops.tree_sum import add_in_pairs
from worker.kernels.cpu import torch_operations
from worker.kernels.cpu.operations import Table
from worker.kernels.cpu.quantization import SCHEMES

DTYPES = [torch.float32, torch.bfloat16]
INPUTS = [16, 80, 208, 576, 1536, 2048]
"""Sections of 2 to 256 inputs: of one pair, with rests beside vectors, tiles and groups, and without."""
OUTPUTS, ROWS = 70, (1, 2, 5, 12, 13, 40)
TABLES = [*BY_TURNS, "portable", "reference"]


@pytest.fixture(params=TABLES)
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    torch.manual_seed(0)
    name = request.param
    if name not in NAMES:
        yield torch_operations.TABLE if name == "portable" else vars(reference)
        return
    use_threads(name, 2)
    yield table_of(name)
    use_threads(name, 1)


def cut(table: Table, x: Tensor, weight: Tensor, ranks: int) -> Tensor:
    """The sum that so many ranks make, each of its piece of the inputs -> [T, out] float32."""
    pieces = zip(x.chunk(ranks, dim=1), weight.chunk(ranks, dim=1), strict=True)
    return add_in_pairs(
        [
            table["linear"](part, table["pack"](piece, sections=8 // ranks), wide=True)
            for part, piece in pieces
        ]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", INPUTS)
def test_ranks_add_up_to_the_same_bits(table: Table, dtype: torch.dtype, inputs: int) -> None:
    if table is torch_operations.TABLE and dtype == torch.bfloat16:
        pytest.skip("torch alone rounds every product in half precision")
    weight, x = torch.randn(OUTPUTS, inputs).to(dtype), torch.randn(max(ROWS), inputs).to(dtype)
    bias, packed = torch.randn(OUTPUTS).to(dtype), table["pack"](weight, sections=8)
    whole = table["linear"](x, packed, wide=True)
    exact = x.double() @ weight.double().t()
    torch.testing.assert_close(whole.double(), exact, rtol=2e-6, atol=2e-6 * inputs**0.5)
    for ranks in (2, 4, 8):
        assert torch.equal(cut(table, x, weight, ranks), whole), ranks
    assert torch.equal(table["linear"](x, packed, bias), (whole + bias).to(dtype)), "rounded once"


@pytest.mark.parametrize("name", BY_TURNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sections_are_added_in_pairs(name: str, dtype: torch.dtype) -> None:
    """They are not added up in their order, nor in one accumulator."""
    table, made = table_of(name), torch.Generator().manual_seed(0)
    weight, x = torch.randn(OUTPUTS, 1536, generator=made), torch.randn(13, 1536, generator=made)
    weight, x = weight.to(dtype), x.to(dtype)
    whole = table["linear"](x, table["pack"](weight, sections=8), wide=True)
    sections = [
        table["linear"](part, table["pack"](piece), wide=True)
        for part, piece in zip(x.chunk(8, dim=1), weight.chunk(8, dim=1), strict=True)
    ]
    assert torch.equal(whole, add_in_pairs(sections))
    assert not torch.equal(whole, sum(sections[1:], sections[0]))  # pyright: ignore[reportArgumentType]
    assert not torch.equal(whole, table["linear"](x, table["pack"](weight), wide=True))


@pytest.mark.parametrize("name", BY_TURNS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "sections"), [(1552, 8), (1536, 8), (1536, 1), (4640, 8), (4640, 1)])
def test_a_row_has_the_same_bits_in_every_batch(
    name: str, dtype: torch.dtype, inputs: int, sections: int
) -> None:
    """Whether or not a section is whole tiles, and panels are computed in stretches, or several together."""
    table, made = table_of(name), torch.Generator().manual_seed(0)
    packed = table["pack"](torch.randn(300, inputs, generator=made).to(dtype), sections=sections)
    x = torch.randn(700, inputs, generator=made).to(dtype)  # more rows than are computed at once
    whole = table["linear"](x, packed, wide=True)
    for rows in ROWS:
        assert torch.equal(table["linear"](x[-rows:], packed, wide=True), whole[-rows:]), rows


@pytest.mark.parametrize("name", BY_TURNS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", INPUTS)
def test_quantized_ranks_too(name: str, scheme: str, dtype: torch.dtype, inputs: int) -> None:
    """Groups begin with each section, so a rank quantizes the matrix and its inputs as one alone does."""
    torch.manual_seed(0)
    table = linear_table(name, scheme)
    weight, x = torch.randn(OUTPUTS, inputs).to(dtype), torch.randn(max(ROWS), inputs).to(dtype)
    whole = table["linear"](x, table["pack"](weight, sections=8), wide=True)
    for rows in ROWS:
        for ranks in (2, 4, 8):
            assert torch.equal(cut(table, x[:rows], weight, ranks), whole[:rows]), (rows, ranks)
    plain = torch_operations.linear_operations(SCHEMES[scheme])
    specified = plain["linear"](x, plain["pack"](weight, sections=8), wide=True)
    torch.testing.assert_close(whole, specified, rtol=1e-5, atol=1e-5 * specified.abs().max().item())
    assert torch.equal(cut(plain, x, weight, 4), specified)


@pytest.mark.parametrize("dtype", DTYPES)
def test_squares(table: Table, dtype: torch.dtype) -> None:
    for width in (24, 104, 1024):
        x, weight = torch.randn(9, width).to(dtype), torch.randn(width).to(dtype)
        whole = add_up(table, x, 8)
        torch.testing.assert_close(
            whole.double(), x.double().square().sum(-1, keepdim=True), rtol=1e-6, atol=0
        )
        for ranks in (2, 4, 8):
            pieces = [add_up(table, piece, 8 // ranks) for piece in x.chunk(ranks, dim=1)]
            assert torch.equal(add_in_pairs(pieces), whole)
        normed = norm(table, x, weight, whole, width)
        pieces = zip(x.chunk(4, dim=1), weight.chunk(4), strict=True)
        cut = [norm(table, *piece, whole, width) for piece in pieces]
        assert torch.equal(torch.cat(cut, dim=1), normed)
        expected = reference.rms_norm(x.double(), weight.double(), 1e-5)
        torch.testing.assert_close(normed.double(), expected, rtol=4e-3, atol=4e-3)


def add_up(table: Table, x: Tensor, sections: int) -> Tensor:
    return table.get("sum_squares", reference.sum_squares)(x, sections)


def norm(table: Table, x: Tensor, weight: Tensor, squares: Tensor, count: int) -> Tensor:
    return table.get("spread_rms_norm", reference.spread_rms_norm)(x, weight, squares, count, 1e-5)


@pytest.mark.parametrize("name", BY_TURNS)
def test_what_cannot_be_divided_is_refused(name: str) -> None:
    for inputs in (20, 24):  # a section is no whole number, or an odd one
        with pytest.raises(ValueError, match="pack"):
            table_of(name)["pack"](torch.randn(4, inputs), sections=8)
    with pytest.raises(ValueError, match="sum_squares"):
        table_of(name)["sum_squares"](torch.randn(4, 20), 8)


@pytest.mark.parametrize("sections", [-1, 3, 16])
def test_there_are_8_sections_at_most(sections: int) -> None:
    """Kernels have places on the stack for so many sums, and add them up in pairs."""
    table, x = table_of(NAMES[0]), torch.ones(4, 96)
    for call in (
        lambda: table["pack"](x, sections=sections),
        lambda: table["sum_squares"](x, sections),
        lambda: table["group_squares"](x, None, 1, sections),
    ):
        with pytest.raises(ValueError, match=f"1, 2, 4 or 8 sections, not in {sections}"):
            call()
