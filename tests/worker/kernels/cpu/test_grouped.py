"""Matrices that checkpoints hold quantized: the C kernels against plain torch, and against exact products."""

from dataclasses import replace

import pytest
import torch
from forms import drawn
from kernel_levels import linear_table
from torch import Tensor

from models.ops import block_codes, reference
from models.ops.block_codes import BitPlane
from models.ops.grouped_matrix import Grouped, describe_sizes, from_column, stacked, widen
from models.ops.tree_sum import add_in_pairs
from worker.kernels.cpu import torch_operations
from worker.kernels.cpu.operations import Table
from worker.kernels.cpu.packing import Packed
from worker.kernels.cpu.quantization import Quantized

DTYPES = [torch.float32, torch.bfloat16]
ROWS = (1, 5, 13)
GROUPS = (8, 32, 96, 128, 1000, 0)


@pytest.fixture
def table(level: str) -> Table:
    return linear_table(level)


PLAIN = torch_operations.linear_operations(None)


def assert_same_sums(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def exact(x: Tensor, matrix: Grouped, bias: Tensor | None = None) -> Tensor:
    """The product in float64, of the inputs as they are."""
    plain = matrix.widened(torch.float64)
    return reference.linear(x.double(), plain, None if bias is None else bias.double())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_the_kernels_compute_what_is_specified(
    table: Table, bits: int, group: int, zeros: bool, ordered: bool
) -> None:
    """Inputs of 16 bits are as good as exact ones; those of 8 bits are rounded as plain torch rounds them."""
    for dtype in DTYPES:
        for input_bits in (8, 16):
            given = {"bits": bits, "group": group, "zeros": zeros, "ordered": ordered}
            matrix = drawn(70, 333, dtype=dtype, input_bits=input_bits, **given)
            bias, packed, specified = torch.randn(70).to(dtype), table["pack"](matrix), PLAIN["pack"](matrix)
            assert isinstance(packed, Packed)
            for rows in ROWS:
                x = torch.randn(rows, 333).to(dtype)
                out = table["linear"](x, packed, bias, wide=True)
                assert_same_sums(out, PLAIN["linear"](x, specified, bias, wide=True))
                if input_bits == 16:
                    expected = exact(x, matrix, bias).float()
                    torch.testing.assert_close(out, expected, rtol=0, atol=2e-4 * expected.abs().max().item())


@pytest.mark.parametrize("rows", [1, 4, 12])
def test_the_largest_sums_fit(table: Table, rows: int) -> None:
    """The largest inputs times the largest codes of the largest groups: no sum of whole numbers overflows."""
    matrix = drawn(64, 256, bits=8, group=128)
    matrix.codes[:] = torch.tensor([0, 255], dtype=torch.uint8).repeat(32)[:, None]
    for sign in (1.0, -1.0):
        x = torch.full((rows, 256), sign)
        out = table["linear"](x, table["pack"](matrix), wide=True)
        torch.testing.assert_close(out, exact(x, matrix).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale_type", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_are_not_rounded(table: Table, scale_type: torch.dtype) -> None:
    """Scales that are subnormal in float16 keep their digits."""
    matrix = drawn(33, 64, scale_type=scale_type)
    matrix.scales[:5] *= 2.0**-14
    x = torch.randn(3, 64)
    expected, out = exact(x, matrix).float(), table["linear"](x, table["pack"](matrix))
    torch.testing.assert_close(
        out / expected.abs().amax(0), expected / expected.abs().amax(0), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("sections", [1, 2, 4, 8])
@pytest.mark.parametrize("group", [32, 128, 0])
def test_sections_are_added_up_as_ranks_do(table: Table, sections: int, group: int) -> None:
    """A piece of the inputs, as a rank holds it, gives the number that the whole adds last."""
    matrix = drawn(40, 8 * 48, group=group, zeros=True)
    x = torch.randn(5, 8 * 48)
    whole = table["linear"](x, table["pack"](matrix, sections=8), wide=True)
    assert_same_sums(whole, PLAIN["linear"](x, PLAIN["pack"](matrix, sections=8), wide=True))
    width = 8 * 48 // sections
    pieces = [
        table["linear"](
            piece, table["pack"](_piece(matrix, i * width, width), sections=8 // sections), wide=True
        )
        for i, piece in enumerate(x.split(width, dim=1))
    ]
    assert torch.equal(add_in_pairs(pieces), whole)


def _piece(matrix: Grouped, start: int, width: int) -> Grouped:
    size = matrix.group or matrix.inputs
    groups = slice(start // size, -(-(start + width) // size))
    assert matrix.offsets is not None
    piece = replace(
        matrix,
        codes=matrix.codes[:, start : start + width],
        scales=matrix.scales[:, groups],
        offsets=matrix.offsets[:, groups],
        inputs=width,
    )
    return from_column(piece, start)


def test_parts_of_which_one_has_zeros_are_packed_like_the_whole(table: Table) -> None:
    parts = [drawn(rows, 67, zeros=rows == 37) for rows in (37, 1, 40, 24)]
    for pack in (table["pack"], PLAIN["pack"]):
        for gated in (False, True):
            assert torch.equal(pack(*parts, gated=gated), pack(stacked(parts), gated=gated))


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_parts_of_other_forms_are_computed_apart(table: Table, kind: str) -> None:
    """Bits, groups and orders may differ from part to part, and some may be plain: nothing is widened."""
    parts = [
        drawn(40, 96, ordered=True),
        drawn(17, 96, ordered=True, zeros=True),
        drawn(13, 96, bits=8, group=0),
        torch.randn(30, 96),
    ]
    x, bias = torch.randn(9, 96), torch.randn(100)
    packed, plain = table["pack"](*parts), torch.cat([widen(part) for part in parts])
    assert packed.nbytes < plain.nbytes
    assert packed.bytes_before == plain.nbytes
    expected = reference.linear(x.double(), plain.double(), bias.double()).float()
    torch.testing.assert_close(table["linear"](x, packed, bias), expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(PLAIN["linear"](x, PLAIN["pack"](*parts), bias), expected, rtol=0, atol=1e-3)
    gated = table["gated_linear"](x, table["pack"](*parts, gated=True), bias, kind)
    torch.testing.assert_close(gated, reference.gated(expected, kind), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("inputs", [1, 64, 77, 133])
def test_codes_lie_anywhere(table: Table, bits: int, gated: bool, inputs: int) -> None:
    """A format may hold codes by inputs, and a part may be a piece of a larger tensor."""
    matrix = drawn(100, inputs, bits=bits)
    both = torch.stack([matrix.codes, matrix.codes], dim=2)
    everywhere = (
        matrix.codes,
        matrix.codes.t().contiguous().t(),
        torch.cat([matrix.codes, matrix.codes], dim=1)[:, :inputs],
        both[..., 0],
        both.transpose(0, 1).contiguous().transpose(0, 1)[..., 1],
    )
    packed = [table["pack"](replace(matrix, codes=codes), gated=gated) for codes in everywhere]
    assert all(torch.equal(packed[0], other) for other in packed[1:])
    x = torch.randn(3, inputs)
    if not gated:
        assert_same_sums(table["linear"](x, packed[0]), PLAIN["linear"](x, PLAIN["pack"](matrix)))


def test_what_kernels_do_not_know_is_computed_by_torch(table: Table) -> None:
    x = torch.randn(3, 60)
    for matrix, given in ((drawn(20, 60, group=6), x), (drawn(20, 60, dtype=torch.half), x.half())):
        packed = table["pack"](matrix)
        assert isinstance(packed, Quantized)
        expected = exact(given, matrix).to(matrix.dtype)
        torch.testing.assert_close(table["linear"](given, packed), expected, rtol=2e-3, atol=2e-3)


def test_a_head_keeps_its_bits(table: Table) -> None:
    matrix, x = drawn(70, 64, zeros=True).padded(3), torch.randn(3, 64)
    head = table["linear"](x, table["pack"](matrix, wide=True), wide=True)
    assert not head[:, 70:].any()
    torch.testing.assert_close(head, exact(x, matrix).float(), rtol=0, atol=1e-3)


def test_memory_is_that_of_the_checkpoint(table: Table) -> None:
    for zeros, extra in ((False, 0), (True, 1)):
        matrix = drawn(320, 1024, group=128, zeros=zeros)
        packed = table["pack"](matrix)
        assert packed.nbytes == 320 * (1024 // 2 + 8 * (2 + extra))
        assert packed.bytes_before == 320 * 1024 * 4
    large = torch.empty(1 << 28, dtype=torch.uint8)
    assert describe_sizes([large, packed]) == "0.3 GiB of weights stand for 0.3"
    assert describe_sizes([large]).startswith("widened to 0.2 GiB")


@pytest.mark.parametrize(
    ("count", "planes", "flipped"),
    [
        (32, (BitPlane(6, 4, 16), BitPlane(2, 1, 1)), 0),
        (256, (BitPlane(48, 4, 32), BitPlane(16, 1, 32)), 0),
        (256, (BitPlane(0, 4, 64), BitPlane(128, 2, 32)), 0),
        (32, (BitPlane(2, 8, 32),), 128),
    ],
    ids=["Q5_0", "Q5_K", "Q6_K", "Q8_0"],
)
def test_blocks_are_split(table: Table, count: int, planes: tuple[BitPlane, ...], flipped: int) -> None:
    blocks = torch.randint(256, (37, 3, 211), dtype=torch.uint8)
    for given in (blocks, blocks[:, 1:], blocks[::2], blocks[:0], blocks[..., 1:]):
        found = table["split_blocks"](given, count, planes, flipped)
        assert found.shape == (len(given), given.shape[1] * count)
        assert torch.equal(found, block_codes.split_blocks(given, count, planes, flipped))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("order", [None, (2, 0, 3, 1)])
@pytest.mark.parametrize("shape", [(1, 1), (31, 9), (33, 8), (70, 25)])
def test_words_are_split(
    table: Table, bits: int, order: tuple[int, ...] | None, shape: tuple[int, int]
) -> None:
    words = torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32)
    places = order if order is None or bits == 8 else (*order, *(place + 4 for place in order))
    each = 32 // bits
    for given in (words, words.t(), words[:, 1:], words[::2]):
        found = table["split_words"](given, bits, places)
        for row, column in ((0, 0), (len(given) - 1, given.shape[1] * each - 1)):
            if not found.numel():
                continue
            place = column % each if places is None else places[column % each]
            assert found[row, column] == int(given[row, column // each]) >> place * bits & (1 << bits) - 1
        assert torch.equal(found, reference.split_words(given, bits, places))
