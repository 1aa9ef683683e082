"""All ranks record a graph or none does, and nobody waits for a rank that cannot. Ranks are threads here."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import interpreted  # noqa: F401  before any kernel is imported
import pytest
import torch
from ranks import Layout

from worker.devices.cpu import Cpu
from worker.kernels.cuda.attention_plan import PlannedLayout
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.steps.graph_capture import GraphRecording, Missing, Recorder
from worker.kernels.cuda.steps.step_graphs import open_graphs
from worker.ranks.process_groups import Groups, join_groups
from worker.steps.compute import Compute

Result = TypeVar("Result")


class Attempts:
    """A capture that notes what it was asked to do, and fails at one of its calls."""

    def __init__(self, fails_at: int = -1, error: Exception | None = None) -> None:
        self.done: list[str] = []
        self._fails_at, self._error = fails_at, error or torch.OutOfMemoryError("out of memory")

    def warm_up(self, work: Callable[[], object]) -> None:
        self._note("warm-up")

    def __call__(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        self._note("capture")
        return work(), lambda: None

    def _note(self, what: str) -> None:
        self.done.append(what)
        if len(self.done) - 1 == self._fails_at:
            raise self._error


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[list[Groups]]:
    """The groups of two ranks."""
    places = Layout(2).places(f"file://{tmp_path}/rendezvous")
    joined = at_once(lambda place: join_groups(place, Cpu(1).open_group, Cpu.target), places)
    yield joined
    for each in joined:
        each.close()


def at_once(run: Callable[..., Result], *of_each: list[Any]) -> list[Result]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, *of_each))


def record(attempts: Attempts, groups: Groups) -> GraphRecording[int] | Missing:
    return Recorder(attempts, groups).record(lambda: lambda: 7)


def test_a_rank_alone_warms_up_once() -> None:
    attempts = Attempts()
    made = record(attempts, Groups())
    assert isinstance(made, GraphRecording) and made.result == 7
    assert attempts.done == ["warm-up", "capture"]


def test_the_log_says_where_a_graph_failed_if_it_is_asked_for_details(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The reason alone, such as "list index out of range", does not tell it."""
    caplog.set_level("DEBUG")
    record(Attempts(0, IndexError("list index out of range")), Groups())
    assert "in _note" in caplog.text


def test_ranks_rehearse_and_warm_up_together_before_they_capture(groups: list[Groups]) -> None:
    attempts = [Attempts(), Attempts()]
    made = at_once(record, attempts, groups)
    assert [isinstance(each, GraphRecording) for each in made] == [True, True]
    assert [each.done for each in attempts] == [["warm-up", "warm-up", "capture"]] * 2


@pytest.mark.parametrize(
    ("error", "short"),
    [(torch.OutOfMemoryError("out of memory"), True), (RuntimeError("it reads lengths"), False)],
)
@pytest.mark.parametrize(("fails_at", "others"), [(0, ["warm-up"]), (2, ["warm-up", "warm-up", "capture"])])
def test_what_fails_on_one_rank_is_made_by_none(
    groups: list[Groups], error: Exception, short: bool, fails_at: int, others: list[str]
) -> None:
    """In its rehearsal, after which no other goes on, or in its capture."""
    attempts = [Attempts(), Attempts(fails_at, error)]
    assert at_once(record, attempts, groups) == [Missing(short, None), Missing(short, str(error))]
    assert attempts[0].done == others
    assert [isinstance(each, GraphRecording) for each in at_once(record, [Attempts(), Attempts()], groups)]


def test_a_rank_that_fails_where_others_wait_for_it_ends(groups: list[Groups]) -> None:
    """The others learn it when it has ended, as of any rank."""

    def run(attempts: Attempts, groups: Groups) -> str:
        try:
            record(attempts, groups)
        except RuntimeError as error:
            groups.close()
            return str(error)
        return "recorded"

    first, second = at_once(run, [Attempts(), Attempts(1, RuntimeError("NCCL is broken"))], groups)
    assert second == "NCCL is broken"
    assert first not in ("recorded", second)


def test_nothing_is_kept_of_what_was_made_for_nothing(groups: list[Groups]) -> None:
    kept: list[object] = []

    class Keeps(Attempts):
        def __call__(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
            result, replay = super().__call__(work)
            return result, lambda: replay()

    class Counted:
        def __del__(self) -> None:
            kept.remove(id(self))

        def __init__(self) -> None:
            kept.append(id(self))

    def run(attempts: Attempts, groups: Groups) -> object:
        return Recorder(attempts, groups).record(lambda: Counted)

    missing = at_once(run, [Keeps(), Attempts(2)], groups)
    assert [type(each) for each in missing] == [Missing, Missing]
    assert kept == []


@pytest.mark.parametrize("others", [Card(90, 78), Card(80, 132)])
def test_ranks_with_different_cards_replay_nothing(
    groups: list[Groups], others: Card, caplog: pytest.LogCaptureFixture
) -> None:
    """The number of multiprocessors decides how keys are split, and so which graph suits a step."""

    def opened(card: Card, groups: Groups) -> object:
        compute = cast("Compute", SimpleNamespace(passes=[]))
        found = open_graphs(compute, card, Attempts, None, groups, most=64)
        assert found is compute and isinstance(compute.lay_out, PlannedLayout)
        return found

    assert len(at_once(opened, [Card(90, 132), others], groups)) == 2
    assert set(caplog.messages) == {
        "steps are not replayed as CUDA graphs, because the cards of the ranks differ"
    }
