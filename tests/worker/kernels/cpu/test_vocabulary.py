"""The passes of the C kernels over whole vocabularies, and the bounds that they write, against torch."""

import numpy as np
import pytest
import torch
from kernel_levels import library_of

from worker.kernels.cpu import vocabulary
from worker.sampling import token_bounds as bounds
from worker.sampling.grouped_logits import BY_TORCH, GROUP, Scan
from worker.sampling.token_bounds import Forbid, RowBits

INF, NAN = torch.inf, torch.nan


@pytest.fixture
def scan(level: str) -> Scan:
    return vocabulary.bind(library_of(level))


@pytest.mark.parametrize("groups", [1, 3, 200])
def test_the_largest_are_found(scan: Scan, groups: int) -> None:
    logits = torch.randn(40, groups * GROUP)
    found, largest = scan.find_largest(logits)
    expected, groups_largest = BY_TORCH.find_largest(logits)
    assert torch.equal(found, expected)
    assert torch.equal(largest, groups_largest)
    alone, _ = scan.find_largest(logits[7:8].clone())
    assert torch.equal(alone[:, 0], found[:, 7])


def test_the_first_of_equal_logits_is_taken(scan: Scan) -> None:
    logits = torch.zeros(3, 5 * GROUP)
    logits[1, [70, 131, 200]] = 2.0
    logits[2, [319, 255, 130]] = 2.0
    assert scan.find_largest(logits)[0].tolist() == [[0, 70, 130], [1, 1, 1]]


@pytest.mark.parametrize("place", [0, 63, 64, 150])
def test_rows_without_an_answer_are_marked_and_change_no_other(scan: Scan, place: int) -> None:
    logits = torch.full((6, 3 * GROUP), -1.0)
    logits[:, 20] = 3.0
    logits[0, place], logits[1, place], logits[2, place] = NAN, INF, -INF
    logits[3] = -INF
    logits[4] = NAN
    (tokens, finite), _ = scan.find_largest(logits)
    assert finite.tolist() == [0, 0, 1, 0, 0, 1]
    assert tokens[[2, 5]].tolist() == [20, 20]
    assert ((tokens >= 0) & (tokens < 3 * GROUP)).all()


def test_a_row_of_one_token_that_is_left(scan: Scan) -> None:
    logits = torch.full((1, 2 * GROUP), -INF)
    logits[0, 127] = -1e30
    assert scan.find_largest(logits)[0].tolist() == [[127], [1]]


@pytest.mark.parametrize("groups", [1, 3, 200])
def test_mass_is_added_up(scan: Scan, groups: int) -> None:
    logits = 20 * torch.randn(9, groups * GROUP)
    logits[5, ::2] = -INF
    rows, temperature = (
        torch.tensor([5, 0, 8, 5], dtype=torch.int32),
        torch.tensor([[0.3], [1.0], [2.5], [1e-3]]),
    )
    peak = logits[rows].amax(-1, keepdim=True)
    sums = scan.sum_mass(logits, rows, peak, temperature)
    exact = ((logits[rows].double() - peak) / temperature).exp().unflatten(1, (-1, GROUP)).sum(-1)
    torch.testing.assert_close(sums.double(), exact, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(sums, BY_TORCH.sum_mass(logits, rows, peak, temperature), rtol=1e-5, atol=1e-7)
    alone = scan.sum_mass(logits, rows[2:3], peak[2:3], temperature[2:3])
    assert torch.equal(alone[0], sums[2])


@pytest.mark.parametrize("width", [1, 37, GROUP])
def test_logits_become_masses(scan: Scan, width: int) -> None:
    logits = 20 * torch.randn(7, width)
    logits[3, ::2] = -INF
    peak, temperature = logits.amax(-1, keepdim=True), torch.linspace(0.3, 2.0, 7)[:, None]
    peak[3] = 25.0
    exact = ((logits.double() - peak) / temperature).exp()
    masses = scan.find_mass(logits.clone(), peak, temperature)
    torch.testing.assert_close(masses.double(), exact, rtol=1e-5, atol=1e-30)
    assert torch.equal(scan.find_mass(logits[2:3].clone(), peak[2:3], temperature[2:3])[0], masses[2])


def test_masses_under_a_floor_are_left_out(scan: Scan) -> None:
    masses, floor = torch.rand(9, GROUP), torch.linspace(0, 1, 9)[:, None]
    masses[4, 7] = floor[4, 0]  # equal to the floor: counted
    exact = torch.where(masses >= floor, masses.double(), 0.0).sum(-1)
    torch.testing.assert_close(scan.sum_above(masses, floor).double(), exact, rtol=1e-6, atol=0)


@pytest.fixture
def forbid(level: str) -> Forbid:
    return vocabulary.bind_forbid(library_of(level))


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.98, 1.0])
@pytest.mark.parametrize("width", [1, 31, 32, 33, 1001, 50_021])
def test_exactly_what_is_forbidden_is_written(forbid: Forbid, width: int, share: float) -> None:
    rng = np.random.default_rng(width)
    rows = np.array([4, 0, 5])
    words = np.packbits(rng.random((3, -(-width // 32) * 32)) < share, axis=1, bitorder="little")
    bits = RowBits(rows, words.view(np.int32))
    logits = torch.from_numpy(rng.normal(size=(6, width)).astype(np.float32))
    expected = logits.clone()
    for row, allowed in zip(rows, np.unpackbits(words, axis=1, bitorder="little"), strict=True):
        expected[row, torch.from_numpy(allowed[:width] == 0)] = -torch.inf
    by_torch = logits.clone()
    bounds.forbid(by_torch, bits)
    forbid(logits, bits)
    assert torch.equal(logits, expected)
    assert torch.equal(by_torch, expected)


def test_no_rows_are_no_work(forbid: Forbid) -> None:
    logits = torch.ones(2, 40)
    forbid(logits, RowBits(np.zeros(0, np.int64), np.zeros((0, 2), np.int32)))
    assert (logits == 1).all()


@pytest.mark.parametrize(
    ("rows", "words"), [([2], (1, 2)), ([0], (1, 1)), ([0], (1, 3)), ([0, 1], (1, 2)), ([-1], (1, 2))]
)
def test_bits_that_do_not_fit_are_refused(forbid: Forbid, rows: list[int], words: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        forbid(torch.ones(2, 40), RowBits(np.array(rows), np.zeros(words, np.int32)))
