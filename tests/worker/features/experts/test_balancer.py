"""Ranks that share experts count tokens, agree on maps without a word, and move experts layer by layer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from drive import Driver, ThreadGroup, load_replicas, step_together
from mixtures import FAMILIES, first_map
from msgspec.structs import replace
from tiny import tiny_checkpoint
from torch import Tensor

from models.layers.experts import Experts
from models.layers.moe import MoeMLP, Router
from models.model import CausalLM
from models.parallel.experts import ExpertPlace
from worker.config import Balancing
from worker.features.experts import balancer as balancers
from worker.features.experts.balancer import Balancer, LoadWindow, improve, summarize
from worker.protocol import Balancedness, ExpertReport

REPLICAS, EXPERTS, COPIES = 4, 8, 4
TOKENS = [[7] * 6, [7, 7, 7, 9], [7], [40, 41]]
OPTIONS = Balancing(num_redundant_experts=COPIES, window_size=4, step_interval=4)


class Together:
    """Replicas that share experts, each of one rank in a thread, with the choices of their tokens."""

    def __init__(self, folder: Path, options: Balancing) -> None:
        loaded = load_replicas(folder, REPLICAS, transport="all_to_all", redundant=COPIES)
        self.models: list[CausalLM] = [ranks[0] for ranks in loaded]
        self._drivers = [Driver([model], max_len=512) for model in self.models]
        group = ThreadGroup(REPLICAS)
        self.chosen: list[list[Tensor]] = []
        """The experts chosen in each step, layer by layer for each replica."""
        for model in self.models:
            for router in (each for each in model.modules() if isinstance(each, Router)):
                router.register_forward_hook(lambda router, given, out: self.chosen[-1].append(out[0]))

        def make(rank: int) -> Balancer:
            place = ExpertPlace(rank, REPLICAS, "linear", "all_to_all", COPIES)
            return Balancer(self.models[rank], place, group.at(rank), 1, options)

        with ThreadPoolExecutor(REPLICAS) as pool:
            self.balancers = list(pool.map(make, range(REPLICAS)))

    def step(self) -> list[dict[int, Tensor]]:
        with ThreadPoolExecutor(REPLICAS) as pool:
            list(pool.map(Balancer.before_step, self.balancers))
        self.chosen.append([])
        return step_together(self._drivers, [{0: tokens} for tokens in TOKENS])

    def reports(self) -> list[ExpertReport | None]:
        return [balancer.take_report() for balancer in self.balancers]

    def layouts(self) -> list[list[list[int]]]:
        """The expert at each place, for each layer of each replica, as its transport looks for it."""
        return [
            [_layout(each.experts) for each in model.modules() if isinstance(each, MoeMLP)]
            for model in self.models
        ]


def _layout(experts: Experts) -> list[int]:
    transport = experts.apart
    assert transport is not None
    counted, transport.tokens = transport.tokens, None
    found = [-1] * (EXPERTS + COPIES)
    for expert in range(EXPERTS):
        ids = torch.full((COPIES + 1, 1), expert)
        for place in transport.find(ids).view(-1).tolist():
            found[place] = expert
    transport.tokens = counted
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = "Qwen2MoeForCausalLM"
    return tiny_checkpoint(name, tmp_path_factory.mktemp("moe"), **FAMILIES[name])


def count(chosen: Sequence[Sequence[Tensor]], layers: int) -> list[list[float]]:
    """The tokens by layer and expert. Hooks of replicas mix, but each replica's layers come in order."""
    totals = [torch.zeros(EXPERTS) for _ in range(layers)]
    for step in chosen:
        by_size: dict[int, list[Tensor]] = {}
        for ids in step:
            by_size.setdefault(len(ids), []).append(ids)
        for rows in by_size.values():
            for layer, ids in enumerate(rows):
                totals[layer] += torch.bincount(ids.view(-1), minlength=EXPERTS)
    return [total.tolist() for total in totals]


def test_balancedness_rises_as_computed(folder: Path) -> None:
    """What the second measurement finds follows from the maps that the first one led to."""
    together = Together(folder, OPTIONS)
    layers = len(together.layouts()[0])
    for _ in range(5):
        together.step()
    start = first_map(EXPERTS, EXPERTS + COPIES)
    loads = count(together.chosen[:4], layers)
    before = [start.balancedness(row, REPLICAS) for row in loads]
    reports = together.reports()
    first = reports[0]
    assert first is not None
    assert all(each and each.balancedness == first.balancedness for each in reports)
    assert first.balancedness == summarize(before)
    for _ in range(4):
        together.step()
    maps = [improve(start, row, ranks=REPLICAS) for row in loads]
    second = together.reports()[0]
    assert second is not None
    assert second.balancedness is not None
    again = count(together.chosen[4:8], layers)
    moved = [found.balancedness(row, REPLICAS) for found, row in zip(maps, again, strict=True)]
    stayed = [start.balancedness(row, REPLICAS) for row in again]
    assert second.balancedness == summarize(moved)
    assert all(new > old for new, old in zip(moved, stayed, strict=True))
    for layouts in together.layouts():
        for layout, found in zip(layouts, maps, strict=True):
            held = (EXPERTS + COPIES) // REPLICAS
            for rank in range(REPLICAS):
                here = slice(rank * held, (rank + 1) * held)
                assert sorted(layout[here]) == sorted(found.experts[here])


@pytest.mark.parametrize("use_async", [True, False])
def test_no_step_moves_more_than_one_layer_if_asked(
    use_async: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = Together(folder, replace(OPTIONS, use_async=use_async))
    moves: list[int] = []
    real = balancers.move

    def counted(*given: object) -> int:
        if given[3] == 0:  # the first rank
            moves[-1] += 1
        return real(*given)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(balancers, "move", counted)
    for _ in range(8):
        moves.append(0)
        together.step()
    layers = len(together.layouts()[0])
    assert layers > 1
    expected = [0, 0, 0, 0, *([1] * layers if use_async else [layers])]
    assert moves == [*expected, *[0] * (8 - len(expected))]
    report = together.reports()[0]
    assert report is not None
    assert len(report.rearrangements) == 1


def test_layers_whose_experts_differ_in_form_stay(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One rank's last layer has another form; all ranks leave that layer alone."""
    forms = iter(range(10**6))
    monkeypatch.setattr(balancers, "form_of", lambda experts: next(forms) if experts.down_bias is None else 0)
    with caplog.at_level(logging.WARNING):
        together = Together(folder, OPTIONS)
    assert "differ in form: they stay where they are" in caplog.text
    before = together.layouts()
    for _ in range(8):
        together.step()
    assert together.layouts() == before


def test_the_first_rank_says_what_was_measured_and_moved(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    together = Together(folder, replace(OPTIONS, log_balancedness=True))
    with caplog.at_level(logging.INFO, balancers.__name__):
        for _ in range(6):
            together.step()
    measured, loaded, moved = (record.getMessage() for record in caplog.records)
    none = "1.000 on average, 1.000 in half of the layers, 1.000 in nine of ten, at least 1.000"
    assert measured == f"balancedness of experts over 4 ranks: {none}"
    report = together.reports()[0]
    assert report is not None
    assert report.balancedness is not None
    assert loaded.endswith(f"at least {report.balancedness.least:.3f}")
    assert moved.startswith("rearranged 2 layers of experts in ")


def test_tokens_are_told_by_layer_and_expert(folder: Path) -> None:
    together = Together(folder, replace(OPTIONS, step_interval=10**6, show_load=True))
    for _ in range(balancers.SHOWN_EVERY):
        assert together.reports() == [None] * REPLICAS
        together.step()
    reports = together.reports()
    layers = len(together.layouts()[0])
    told = [report.tokens for report in reports if report is not None]
    assert [list(tokens) for tokens in told] == [[0, 2]] * REPLICAS, "the layer between is dense"
    for layer, expected in zip([0, 2], count(together.chosen, layers), strict=True):
        summed = [sum(tokens[layer][expert] for tokens in told) for expert in range(EXPERTS)]
        assert summed == expected
    assert together.reports() == [None] * REPLICAS


def test_neighbouring_tokens_take_different_copies(folder: Path) -> None:
    model = load_replicas(folder, 2, transport="all_to_all", redundant=COPIES)[1][0]
    transport = next(each for each in model.modules() if isinstance(each, Experts)).apart
    assert transport is not None
    ids = torch.tensor([[0, 5], [0, 5], [0, 5]], dtype=torch.int32)
    assert transport.find(ids).tolist() == [[8, 5], [0, 5], [8, 5]], "the first has two copies"


def test_balancedness_of_layers_in_four_numbers() -> None:
    layers = [0.5, 1.0, 0.9, 0.8, 0.7, 0.6, 0.95, 0.85, 0.75, 0.65]
    expected = Balancedness(least=0.5, p50=0.8, p90=0.6, average=pytest.approx(0.77))
    assert summarize(layers) == expected
    assert summarize([0.25]) == Balancedness(0.25, 0.25, 0.25, 0.25)


@pytest.mark.parametrize(("size", "most"), [(1, 1), (4, 4), (8, 8), (9, 11), (20, 23), (80, 89)])
def test_a_window_holds_its_last_steps_and_one_part_more_at_most(size: int, most: int) -> None:
    totals = torch.zeros(2, 3, dtype=torch.int64)
    window = LoadWindow(totals, size)
    for step in range(4 * size):
        window.advance()
        held = int(window.loads()[0, 0])
        assert min(step, size) <= held <= most
        assert window.loads().tolist() == [[held, 2 * held, 0]] * 2
        totals += torch.tensor([1, 2, 0])
