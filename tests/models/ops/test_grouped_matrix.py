"""The one form of quantized matrices: what its numbers mean, and that pieces and joins mean the same."""

from dataclasses import replace

import pytest
import torch
from forms import FORMS, Shape
from torch import Tensor

from models.ops.grouped_matrix import Grouped, from_column, halves, sorted_by_group, stacked, widen
from models.weight_coding import E2M1, E4M3, IQ4, LEVELS

ROWS, COLUMNS = 6, 16 * 40
"""COLUMNS are two and a half runs of 256, the super-blocks of GGUF."""


def forms() -> dict[str, Grouped]:
    torch.manual_seed(0)
    shape = Shape(ROWS, COLUMNS)
    bytes_of_floats = torch.randint(127, (ROWS, COLUMNS), dtype=torch.uint8)
    zeros = torch.randint(16, (ROWS, COLUMNS // 32), dtype=torch.uint8)
    return {
        **{name: make(shape) for name, make in FORMS.items()},
        "zero points": replace(FORMS["Q4_0"](shape), offsets=zeros),
        "a row": shape.made(8, 0, shape.numbers(COLUMNS)),
        "e4m3": replace(shape.made(8, 128, shape.numbers(128), E4M3), codes=bytes_of_floats),
    }


MATRICES = forms()


@pytest.fixture(params=MATRICES)
def matrix(request: pytest.FixtureRequest) -> Grouped:
    return MATRICES[request.param]


def meant(matrix: Grouped, row: int, column: int) -> float:
    """What an element means, from the numbers that are there for it."""
    group = column // (matrix.group or COLUMNS)
    code, scale = int(matrix.codes[row, column]), matrix.scales[row, group].double().item()
    minimum = 0.0 if matrix.minimums is None else matrix.minimums[row, group].double().item()
    if factors := matrix.factors:
        scale *= factors.scales[row, group // factors.run].item()
        minimum *= 0.0 if factors.minimums is None else factors.minimums[row, group // factors.run].item()
    if matrix.kind in LEVELS:
        return scale * LEVELS[matrix.kind][code]
    if matrix.kind == E4M3:
        return scale * torch.tensor(code, dtype=torch.uint8).view(torch.float8_e4m3fn).item()
    zero = 1 << (matrix.bits - 1) if matrix.minimums is None else 0
    return scale * (code - (zero if matrix.offsets is None else int(matrix.offsets[row, group]))) + minimum


def test_an_element_is_what_its_numbers_mean(matrix: Grouped) -> None:
    plain = matrix.widened(torch.float64)
    for row, column in ((0, 0), (1, 31), (2, 32), (3, 255), (4, 256), (5, COLUMNS - 1), (3, 300)):
        expected = meant(matrix, row, column)
        assert plain[row, column].item() == pytest.approx(expected, rel=1e-6, abs=1e-6), (row, column)


def test_all_levels_are_those_of_the_formats() -> None:
    """E2M1 by its own rule: a sign, two bits of exponent and one of mantissa."""
    for code, level in enumerate(LEVELS[E2M1]):
        exponent, mantissa = code >> 1 & 3, code & 1
        size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
        assert level == (-size if code & 8 else size)
    assert list(LEVELS[IQ4]) == sorted(LEVELS[IQ4])
    assert (len(LEVELS[IQ4]), LEVELS[IQ4][0], LEVELS[IQ4][-1]) == (16, -127, 113)


@pytest.mark.parametrize("sections", [None, 1, 2, 4, 8])
def test_groups_that_end_with_sections_mean_the_same(matrix: Grouped, sections: int | None) -> None:
    """A section may begin within a group or a run: 8 of them have 80 columns each."""
    fitted = matrix.in_groups(sections)
    assert torch.equal(fitted.widened(), matrix.widened())
    assert 0 < fitted.group <= 128
    if matrix.group:
        assert (COLUMNS // (sections or 1)) % fitted.group == 0
    assert fitted.scales.dtype == matrix.scales.dtype
    assert (fitted.factors is None) == (matrix.factors is None)


@pytest.mark.parametrize(("start", "stop"), [(0, 640), (0, 80), (256, 512), (80, 240), (264, 640), (40, 41)])
def test_a_piece_of_the_columns_means_the_same(matrix: Grouped, start: int, stop: int) -> None:
    size = matrix.group or COLUMNS
    unit = size * matrix.factors.run if matrix.factors else size
    first, last = start // unit * unit, -(-stop // unit) * unit
    piece = matrix.of(
        [
            matrix.codes[:, start:stop],
            *(_covering(tensor, first, last) for tensor in matrix.tensors()[1:]),
        ]
    )
    found = from_column(replace(piece, inputs=stop - start), start)
    assert torch.equal(found.widened(), matrix.widened()[:, start:stop])
    assert torch.equal(found.in_groups().widened(), found.widened())


def _covering(tensor: Tensor, first: int, last: int) -> Tensor:
    """The groups, or runs, of a range of columns that they cover."""
    each = {1: COLUMNS, 3: 256}.get(tensor.shape[1], COLUMNS // tensor.shape[1])
    return tensor[:, first // each : -(-last // each)]


def test_rows_and_joins_mean_the_same(matrix: Grouped) -> None:
    plain = matrix.widened()
    assert torch.equal(matrix.rows(2, 5).widened(), plain[2:5])
    upper, lower = halves(matrix)
    joined = stacked([lower, upper, matrix])
    assert isinstance(joined, Grouped)
    assert torch.equal(widen(joined), torch.cat([plain[3:], plain[:3], plain]))
    padded = matrix.padded(2).widened()
    assert torch.equal(padded[:ROWS], plain)
    assert not padded[ROWS:].any()


def test_forms_that_differ_are_not_joined() -> None:
    """Each pair differs in one thing: a kind, the type of scales, minimums, or the factors."""
    for one, other in (("Q4_0", "IQ4_NL"), ("IQ4_NL", "IQ4_XS"), ("Q4_0", "Q4_1"), ("Q4_K", "Q4_1")):
        parts = [MATRICES[one], MATRICES[other]]
        assert torch.equal(widen(stacked(parts)), torch.cat([part.widened() for part in parts]))
        assert isinstance(stacked(parts), Tensor)


def test_columns_sorted_by_group_mean_the_same(matrix: Grouped) -> None:
    """The columns of a form, which lie in any order, and of which a piece has groups of several lengths."""
    shuffled = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))
    group_of = torch.arange(COLUMNS) // (matrix.group or COLUMNS)
    whole = sorted_by_group(replace(matrix, codes=matrix.codes[:, shuffled]), group_of[shuffled])
    assert torch.equal(whole.widened(), matrix.widened()[:, shuffled])
    kept = shuffled[:300]
    piece = sorted_by_group(replace(matrix, codes=matrix.codes[:, kept], inputs=300), group_of[kept])
    assert torch.equal(piece.widened(), matrix.widened()[:, kept])
