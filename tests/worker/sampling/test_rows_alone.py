"""A row's token and log-probabilities have the same bits alone and beside rows with any options."""

from collections.abc import Iterator

import pytest
import torch
from kernel_levels import BY_TURNS, library_of, use_threads
from torch import Tensor

from worker.kernels.cpu import vocabulary
from worker.sampling import top_k_top_p as draw_module
from worker.sampling.grouped_logits import BY_TORCH, GROUP, GroupedLogits, Scan
from worker.sampling.logprobs import logprob_table
from worker.sampling.top_k_top_p import Draws, LazyMass, draw

# top_p, top_k, min_p
PLAIN, NUCLEUS, WIDE, BOUNDED = (1.0, 0, 0.0), (0.6, 0, 0.0), (0.999, 0, 0.0), (0.9, 90, 0.0)
OPTIONS = [PLAIN, NUCLEUS, WIDE, BOUNDED, (0.95, 1500, 0.0), (1.0, 3, 0.0), (1.0, 0, 0.2), (0.8, 0, 0.001)]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(params=[*BY_TURNS, "torch"])
def scan(request: pytest.FixtureRequest, threads: int) -> Iterator[Scan]:
    """The passes over logits by kernels and by torch, with one thread and two."""
    name = request.param
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if name != "torch":
        use_threads(name, threads)
    yield BY_TORCH if name == "torch" else vocabulary.bind(library_of(name))
    torch.set_num_threads(before)


def draws(options: list[tuple[float, int, float]]) -> Draws:
    """The plan of rows with these options, whose points are far from each other."""
    top_p, top_k, min_p = (torch.tensor(each)[:, None] for each in zip(*options, strict=True))
    return Draws(
        rows=torch.arange(len(options), dtype=torch.int32),
        temperature=torch.full((len(options), 1), 0.7),
        top_p=top_p,
        top_k=top_k.int(),
        min_p=min_p,
        points=torch.full((len(options), 1), 1 << 30, dtype=torch.int32),
        largest_k=int(top_k.max()),
        has_min_p_or_top_k=bool((top_k > 0).any() or (min_p > 0).any()),
        has_top_p=bool((top_p < 1).any()),
        bounded=not bool(((top_p < 1) & (top_k == 0)).any()),
    )


def floors_and_tokens(logits: Tensor, plan: Draws, scan: Scan) -> tuple[Tensor, Tensor]:
    found: list[Tensor] = []

    def pick(mass: object, floor: Tensor | None, points: Tensor) -> Tensor:
        found.append(torch.zeros(len(points), 1) if floor is None else floor)
        return own(mass, floor, points)  # pyright: ignore[reportArgumentType]

    own = draw_module._pick  # pyright: ignore[reportPrivateUsage]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw_module, "_pick", pick)
        tokens = draw(GroupedLogits(logits, scan), plan, may_sync=True)
    return found[0].view(torch.int32), tokens


@pytest.mark.parametrize(("vocabulary_size", "spread"), [(1001, 0.1), (1001, 3.0), (20_000, 2.0)])
def test_draws_beside_rows_with_other_options(scan: Scan, vocabulary_size: int, spread: float) -> None:
    logits = spread * torch.randn(len(OPTIONS), vocabulary_size)
    floors, tokens = floors_and_tokens(logits, draws(OPTIONS), scan)
    for row, options in enumerate(OPTIONS):
        floor, token = floors_and_tokens(logits[row : row + 1], draws([options]), scan)
        assert (floor.item(), token.item()) == (floors[row].item(), tokens[row].item())


def test_sums_of_masses_are_the_same_with_a_floor_of_zero_and_without_one(scan: Scan) -> None:
    logits = GroupedLogits(2 * torch.randn(4, 20_000), scan)
    mass = LazyMass(logits, torch.arange(4, dtype=torch.int32), torch.full((4, 1), 0.7))
    sums = mass.sums(torch.zeros(4, 1))
    assert torch.equal(mass.sums(None), sums)
    for group in (0, 100, 312):
        inside = mass.group(torch.full((4, 1), group))
        assert inside.shape == (4, GROUP)
        assert torch.equal(scan.sum_above(inside, torch.zeros(4, 1)), sums[:, group])


def test_another_rows_top_k_does_not_decide_how_a_floor_is_found(
    scan: Scan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of masses and a search through all of them may find floors that differ in the last digit."""

    def search(*_: object) -> Tensor:
        raise AssertionError("the floor is among the first masses")

    monkeypatch.setattr(draw_module, "_search_floor", search)
    logits = 0.1 * torch.randn(2, 20_000)
    logits[0, :500] += 20  # hold all mass, so that a top_p needs more than a shortlist and less than LONGEST
    floors_and_tokens(logits, draws([NUCLEUS, (1.0, 100, 0.0)]), scan)


@pytest.mark.parametrize("vocabulary_size", [1001, 49_152, 151_936])
@pytest.mark.parametrize("threads", [1, 2])
def test_logprobs_alone_and_in_a_batch(vocabulary_size: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    logits, tokens = 3 * torch.randn(8, vocabulary_size), torch.arange(8)
    logits[:, 70] = logits[:, 40] = 30.0  # the likeliest two are equal
    together = logprob_table(logits, tokens, 5)
    for row in range(8):
        alone = logprob_table(logits[row : row + 1].clone(), tokens[row : row + 1], 5)
        assert torch.equal(alone[0], together[row])
    torch.set_num_threads(before)
