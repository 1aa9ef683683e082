"""The draw in Triton against the rule in torch: the same tokens, whatever filters a row has."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from draws import make_draws
from interpreted import DEVICE
from torch import Tensor

from worker.kernels.cuda import draw_kernel as by_triton
from worker.kernels.cuda.launch import KernelLaunch, collecting, taking
from worker.sampling.grouped_logits import BY_TORCH, GroupedLogits
from worker.sampling.top_k_top_p import Draw, Draws, draw_fully
from worker.tables.random_bits import uniform

TEMPERATURES = (0.7, 1.0, 1.3, 0.5, 2.0, 1e-3)
TOP_K = (0, 1, 7, 50, 400, 5000)
TOP_P = (1.0, 0.3, 0.9, 0.99, 1e-6)
MIN_P = (0.0, 0.02, 0.3, 1.0)


def draws(top_k: list[int], top_p: list[float], min_p: list[float], temperature: list[float]) -> Draws:
    """Draws of rows that lie in another order than their logits."""
    chance = np.random.default_rng(7)
    count = len(top_k)
    seeds = chance.integers(0, 2**63, count, dtype=np.uint64) * 2 + 1
    points = uniform(seeds, chance.integers(0, 4000, count))
    made = make_draws(points, temperature, top_k, top_p, min_p, DEVICE)
    return replace(made, rows=made.rows.flip(0))


def draws_of_all_options(rows: int, share: float) -> Draws:
    """Draws of which this share has each filter, whatever others it has."""
    chance = np.random.default_rng(rows)
    filters = [
        np.where(chance.random(rows) < share, chance.choice(values, rows), off).tolist()
        for off, *values in (TOP_K, TOP_P, MIN_P)
    ]
    return draws(*filters, chance.choice(TEMPERATURES, rows).tolist())  # pyright: ignore[reportCallIssue]


def some_logits(rows: int, width: int, spread: float = 3) -> Tensor:
    """Logits of which some are forbidden, and many are equal to others."""
    made = torch.Generator().manual_seed(rows + width)
    logits = spread * torch.randn(rows, width, generator=made)
    logits[:, width // 7 : width // 3] = float("-inf")
    logits[::3] = (logits[::3] * 4).round() / 4
    return logits.to(DEVICE)


@pytest.mark.parametrize(
    ("rows", "share", "width", "spread"),
    [
        (200, 0.1, 1500 + 77, 3),  # a row with a search takes the interpreter 30 ms
        (30, 0.7, 4096 + 1, 0.2),  # so flat that all groups are listed
        (12, 0.7, 64, 2),
        (6, 0.7, 32_000 + 5, 3),
        (3, 0.7, 151_936, 4),
    ],
)
def test_the_same_tokens_are_drawn(rows: int, share: float, width: int, spread: float) -> None:
    grouped = GroupedLogits(some_logits(rows, width, spread), BY_TORCH)
    wanted = draws_of_all_options(rows, share)
    assert by_triton.draw(grouped, wanted).tolist() == draw_fully(grouped, wanted).tolist()


def kept_shares(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """The probability of each token in float64, straight from what the filters mean."""
    shares = (logits.double().cpu() / temperature).softmax(0)
    ordered, tokens = shares.sort(descending=True)
    if top_k:
        ordered[top_k:] = 0
    before = ordered.cumsum(0) - ordered
    ordered[before >= top_p * ordered.sum()] = 0
    return torch.zeros_like(shares).scatter(0, tokens, ordered / ordered.sum())


def assert_drawn_by(shares: Tensor, tokens: Tensor) -> None:
    """Pearson's test: the counts of tokens differ from what is expected as much as chance makes them.

    The bounds are those that one in a thousand such tests passes on either side (Wilson and Hilferty).
    """
    counts = torch.bincount(tokens.cpu().long(), minlength=len(shares))
    expected = shares * len(tokens)
    assert counts[shares == 0].sum() == 0
    assert expected[shares > 0].min() >= 5, "or the bounds are not those of counts"
    distance = ((counts - expected).square() / expected)[shares > 0].sum()
    freedom = int((shares > 0).sum()) - 1
    low, high = (
        freedom * (1 - 2 / (9 * freedom) + side * (2 / (9 * freedom)) ** 0.5) ** 3 for side in (-3.09, 3.09)
    )
    assert low < distance < high


@pytest.mark.parametrize(
    ("drawn_by", "count", "width", "top_k", "top_p", "growing"),
    [
        (by_triton.draw, 200, 10, 0, 1.0, "indices"),
        (draw_fully, 200_000, 60, 0, 1.0, "seeds"),
        (draw_fully, 200_000, 60, 0, 1.0, "indices"),
        (draw_fully, 20_000, 60, 40, 0.9, "indices"),
    ],
)
def test_tokens_come_as_often_as_they_should(
    drawn_by: Draw, count: int, width: int, top_k: int, top_p: float, growing: str
) -> None:
    """Requests have a seed each, and a long text the indices of its tokens: both are as good as chance.

    The rule on the host draws more often, and the kernel draws its tokens.
    """
    logits, temperature = torch.randn(width, generator=torch.Generator().manual_seed(3)), 1.3
    numbers, same = np.arange(count, dtype=np.uint64), np.zeros(count, dtype=np.uint64)
    points = uniform(numbers, same) if growing == "seeds" else uniform(same + 7, numbers)
    wanted = draws([top_k] * count, [top_p] * count, [0.0] * count, [temperature] * count)
    wanted.points.copy_(torch.from_numpy(points)[:, None])
    grouped = GroupedLogits(logits.expand(count, -1).contiguous().to(DEVICE), BY_TORCH)
    assert_drawn_by(kept_shares(logits, temperature, top_k, top_p), drawn_by(grouped, wanted))


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (20, 1.0, 0.0), (0, 0.9, 0.0)])
def test_tokens_are_drawn_by_one_filter(top_k: int, top_p: float, min_p: float) -> None:
    grouped = GroupedLogits(some_logits(6, 4096 + 77), BY_TORCH)
    wanted = draws([top_k] * 6, [top_p] * 6, [min_p] * 6, [*TEMPERATURES])
    assert by_triton.draw(grouped, wanted).tolist() == draw_fully(grouped, wanted).tolist()


def test_tokens_may_be_written_over_the_likeliest_ones() -> None:
    """Rows without a temperature keep theirs."""
    grouped = GroupedLogits(some_logits(4, 200), BY_TORCH)
    wanted = draws([0, 5, 0, 9], [1.0, 1.0, 0.8, 1.0], [0.0] * 4, [1.0, 0.0, 0.7, 0.0])
    wanted.rows.copy_(torch.arange(4))
    likeliest, drawn = grouped.best[0].tolist(), draw_fully(grouped, wanted).tolist()
    by_triton.draw_into(grouped, wanted, grouped.best[0])
    assert grouped.best[0].tolist() == [drawn[0], likeliest[1], drawn[2], likeliest[3]]


@pytest.mark.parametrize("rows", [1, 64, 200])
@pytest.mark.parametrize("bounded", [False, True])
def test_a_draw_is_four_launches_however_many_rows_it_has(rows: int, bounded: bool) -> None:
    """One row alone is read by a program for each 4,096 tokens; rows without a top_p alone need two."""
    logits = GroupedLogits(torch.zeros(rows, 151_936, device="meta"), BY_TORCH)
    wanted = replace(by_triton.filters(torch.device("meta")), bounded=bounded)
    with collecting() as calls:
        by_triton.draw_into(logits, wanted, torch.empty(rows, device="meta"))
    assert [(call.kernel.fn.__name__, call.grid) for call in calls] == [
        ("survey_groups", (rows, 38)),
        *[("narrow", (rows, 38))] * (0 if bounded else 2),
        ("draw_row", (rows,)),
    ]


@pytest.mark.parametrize("spread", [0.0, 1e-4, 0.05, 1.0, 10.0, 40.0])
def test_floors_of_top_p_are_found_however_flat_rows_are(spread: float) -> None:
    """Where all logits are equal, more masses lie in the last window than have room in its list."""
    grouped = GroupedLogits(some_logits(4, 5000, spread), BY_TORCH)
    wanted = draws([0] * 4, [0.9, 0.5, 0.999, 1e-6], [0.0, 0.0, 0.0, 0.01], [1.0, 0.7, 1.3, 1.0])
    assert by_triton.draw(grouped, wanted).tolist() == draw_fully(grouped, wanted).tolist()


def test_floors_of_top_p_are_found_among_few_masses_of_a_large_vocabulary() -> None:
    """No row is searched whole. The first window tells enough, but for a row whose masses are all alike."""
    spread = torch.tensor([[9.0], [3.0], [0.1]])  # the last row of logits is drawn first
    logits = spread * torch.randn(3, 151_936, generator=torch.Generator().manual_seed(5))
    grouped = GroupedLogits(logits.to(DEVICE), BY_TORCH)
    wanted = draws([0] * 3, [0.9, 0.9, 0.97], [0.0] * 3, [1.0, 0.9, 1.1])
    numbers: list[Tensor] = []

    def start(call: KernelLaunch) -> None:
        call.start()
        if call.kernel.fn.__name__ == "draw_row":
            (lines,) = (
                each
                for each in call.arguments
                if isinstance(each, Tensor) and each.ndim == 3 and each.shape[2] == by_triton._BINS + 4
            )
            numbers.append(lines[:, :, by_triton._BINS + 2])

    with taking(start):
        drawn = by_triton.draw(grouped, wanted)
    assert drawn.tolist() == draw_fully(grouped, wanted).tolist()
    once, twice = (numbers[0] <= by_triton._ROOM).tolist()
    assert once == [False, True, True]
    assert twice[0]


def test_a_draw_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_triton.draws_right(DEVICE)
    monkeypatch.setattr(by_triton, "draw", lambda logits, draws: torch.zeros(4, dtype=torch.int32))
    assert not by_triton.draws_right(DEVICE)


@pytest.mark.parametrize("value", [float("-inf"), float("inf"), float("nan")])
def test_a_row_without_finite_logits_still_ends(value: float) -> None:
    """Its logits are found not to be finite elsewhere, and its token is not used."""
    logits = torch.full((6, 130), value, device=DEVICE)
    wanted = draws([3] * 6, [0.9] * 6, [0.0] * 6, [1.0] * 6)
    drawn = by_triton.draw(GroupedLogits(logits, BY_TORCH), wanted)
    assert all(0 <= token < 130 for token in drawn.tolist())
