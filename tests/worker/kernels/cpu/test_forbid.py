"""The C kernel that writes bounds into logits, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_levels import NAMES, library_of, use_threads

from worker.kernels.cpu import vocabulary
from worker.sampling import bounds
from worker.sampling.bounds import Forbid, RowBits


@pytest.fixture(params=NAMES)
def forbid(request: pytest.FixtureRequest) -> Forbid:
    use_threads(request.param, 2)
    return vocabulary.bind_forbid(library_of(request.param))


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
