"""Pooling by Triton against float64, with NaN in everything that must not be read."""

from collections.abc import Callable, Sequence

import pytest
import torch
from interpreted import DEVICE
from torch import Tensor

from models.ops.pooling_ops import Segments
from models.pooling.pooling_modes import MERGERS
from worker.kernels.cuda.launch import collecting
from worker.kernels.cuda.pooling_kernel import MODES, apart, pool

LENGTHS, SKIPS = (7, 1, 130, 64, 3), (0, 5, 9, 0, 2)


def send(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def exact(mode: str, rows: Tensor, skip: int) -> Tensor:
    """What a text is merged into, in float64, from the definition of each way."""
    x = rows[skip:].double()
    weights = torch.arange(skip + 1, len(rows) + 1, dtype=torch.float64, device=rows.device)[:, None]
    ways: dict[str, Callable[[], Tensor]] = {
        "CLS": lambda: x[0],
        "LAST": lambda: x[-1],
        "MEAN": lambda: x.mean(0),
        "MAX": lambda: x.amax(0),
        "MEAN_SQRT_LEN": lambda: x.sum(0) / len(x) ** 0.5,
        "WEIGHTED_MEAN": lambda: (x * weights).sum(0) / weights.sum(),
    }
    return ways[mode]()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 67])
@pytest.mark.parametrize("mode", MODES)
def test_texts_are_merged(mode: str, width: int, dtype: torch.dtype) -> None:
    """Rows of instructions, those behind the last text and columns beside them are not read."""
    torch.manual_seed(0)
    texts = [torch.randn(length, width).to(dtype) for length in LENGTHS]
    skips = [skip if skip < length else 0 for skip, length in zip(SKIPS, LENGTHS, strict=True)]
    wide = torch.full((sum(LENGTHS) + 3, width + 2), torch.nan, dtype=dtype)
    wide[: sum(LENGTHS), :width] = torch.cat(texts)
    segments = Segments.packed(LENGTHS, SKIPS, send)
    for start, first, _ in segments.on_host:
        wide[start:first] = torch.nan
    out = pool(wide.to(DEVICE)[:, :width], segments, mode, MERGERS[mode])  # pyright: ignore[reportArgumentType]
    expected = torch.stack([exact(mode, text, skip) for text, skip in zip(texts, skips, strict=True)])
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double().cpu(), expected, rtol=2e-6, atol=2e-6)


def test_some_texts_are_merged_in_their_order() -> None:
    rows = torch.arange(20.0, device=DEVICE).view(10, 2)
    segments = Segments.packed([4, 1, 5], [0, 0, 2], send)
    assert segments.of([0, 1, 2]) is segments
    chosen = segments.of([2, 0])
    assert chosen.lengths == [5, 4]
    assert pool(rows, chosen, "LAST", MERGERS["LAST"]).tolist() == [[18, 19], [6, 7]]
    assert pool(rows, chosen, "CLS", MERGERS["CLS"]).tolist() == [[14, 15], [0, 1]]


@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_a_number_is_not_hidden(mode: str) -> None:
    rows = torch.full((5, 3), torch.nan, device=DEVICE)
    segments = Segments.packed([5], [0], send)
    assert pool(rows, segments, mode, MERGERS[mode]).isnan().all()  # pyright: ignore[reportArgumentType]


def test_rows_that_lie_otherwise_are_left_to_torch() -> None:
    rows = torch.randn(3, 5).t().to(DEVICE)
    out = pool(rows, Segments.packed([2, 3], [0, 0], send), "MAX", MERGERS["MAX"])
    assert out.tolist() == [rows[:2].amax(0).tolist(), rows[2:].amax(0).tolist()]


@pytest.mark.parametrize("texts", [1, 60])
def test_a_step_of_many_texts_is_merged_by_one_launch_and_projected_once(texts: int) -> None:
    nowhere = torch.device("meta")
    rows = torch.empty(8 * texts, 384, device=nowhere)
    segments = Segments.packed(
        [8] * texts, [0] * texts, lambda places: torch.empty(len(places), 3, device=nowhere)
    )
    with collecting() as calls:
        merged = pool(rows, segments, "MEAN", MERGERS["MEAN"])
    assert [call.grid for call in calls] == [(texts, 6)]
    seen: list[Sequence[int]] = []

    def project(some: Tensor) -> Tensor:
        seen.append(some.shape)
        return some

    apart(project, merged, [1] * texts)
    assert seen == [(texts, 384)]
