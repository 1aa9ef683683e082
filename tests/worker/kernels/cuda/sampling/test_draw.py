"""The draw in Triton against the rule in torch: the same tokens, whatever filters a row has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from interpreted import DEVICE
from torch import Tensor

from worker.kernels.cuda.sampling import draw as by_triton
from worker.sampling.draw import Draws, draw_fully
from worker.sampling.groups import BY_TORCH, GroupedLogits
from worker.sampling.points import uniform

ROWS, WIDTH = 6, 4096 + 77


def draws(top_k: list[int], top_p: list[float], min_p: list[float]) -> Draws:
    """Draws of rows that lie in another order than their logits."""
    chance = np.random.default_rng(7)
    seeds = chance.integers(0, 2**63, ROWS, dtype=np.uint64) * 2 + 1
    points = uniform(seeds, chance.integers(0, 4000, ROWS))

    def column(values: object, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(np.asarray(values), dtype=dtype).to(DEVICE)[:, None]

    return Draws(
        rows=torch.arange(ROWS, dtype=torch.int32, device=DEVICE).flip(0),
        temperature=column([0.7, 1.0, 1.3, 0.5, 2.0, 1e-3], torch.float32),
        top_k=column(top_k, torch.int32),
        top_p=column(top_p, torch.float32),
        min_p=column(min_p, torch.float32),
        points=column(points, torch.int32),
        largest_k=max(top_k),
        has_min_p_or_top_k=max(top_k) > 0 or max(min_p) > 0,
        has_top_p=min(top_p) < 1,
        bounded=False,
    )


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy warns where a whole row is forbidden
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        ([0] * 6, [1.0] * 6, [0.0] * 6),
        ([20] * 6, [1.0] * 6, [0.0] * 6),
        ([0] * 6, [0.9] * 6, [0.0] * 6),
        ([0, 1, 50, 5000, 0, 3], [0.8, 1.0, 0.95, 0.5, 1.0, 0.9], [0.0, 0.0, 0.01, 0.0, 0.05, 0.2]),
    ],
)
def test_the_same_tokens_are_drawn(top_k: list[int], top_p: list[float], min_p: list[float]) -> None:
    torch.manual_seed(3)
    logits = (3 * torch.randn(ROWS, WIDTH)).to(DEVICE)
    logits[:, 100:2000] = float("-inf")  # forbidden
    wanted = draws(top_k, top_p, min_p)
    grouped = GroupedLogits(logits, BY_TORCH)
    assert by_triton.draw(grouped, wanted).tolist() == draw_fully(grouped, wanted).tolist()


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_draw_that_differs_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert by_triton.open_draw(DEVICE) is by_triton.draw
    monkeypatch.setattr(by_triton, "draw", lambda logits, draws: torch.zeros(4, dtype=torch.int32))
    assert by_triton.open_draw(DEVICE) is draw_fully
    assert "torch does it" in caplog.text


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_row_that_allows_nothing_still_ends() -> None:
    """Its logits are found not to be finite elsewhere, and its token is not used."""
    logits = torch.full((ROWS, 130), float("-inf"), device=DEVICE)
    drawn = by_triton.draw(GroupedLogits(logits, BY_TORCH), draws([3] * 6, [0.9] * 6, [0.0] * 6))
    assert all(0 <= token < 130 for token in drawn.tolist())
