"""The bounds of one step, row by row: who has some, who has none any more, and who has to wait."""

import pytest
from fake_worker import allowed_ids, facts
from scheduler_bench import Bench, add, add_to, config
from toy_language import Language, ToyMatcher

from engine_core.protocol import Failed, OutputsByClient
from engine_core.scheduling.planned_step import PlannedStep
from worker.protocol import StepBounds

LANGUAGE = Language(shortest=20)


@pytest.fixture
def bench() -> Bench:
    """Two requests in a language and one that is in none, with their first step in flight."""
    bench = Bench(config(steps_ahead=1), facts(), depth=1)
    for id in range(3):
        matcher = ToyMatcher(LANGUAGE) if id < 2 else None
        assert add_to(bench.scheduler, 0, add(id, [id + 1, 7], max_tokens=9), 0.0, matcher) is None
    return bench


def plan(bench: Bench) -> PlannedStep:
    planned = bench.scheduler.schedule(0.0)
    assert planned is not None
    return planned


def bounds(bench: Bench, planned: PlannedStep, outputs: OutputsByClient | None = None) -> StepBounds | None:
    return bench.scheduler.bind(planned, {} if outputs is None else outputs)


def test_only_rows_in_a_language_have_bounds(bench: Bench) -> None:
    planned = plan(bench)
    assert planned.binds and [row.bound for row in planned.step.seqs] == [True, True, False]
    found = bounds(bench, planned)
    assert found is not None and found.number == planned.step.number
    slots = [row.slot for row in planned.step.seqs]
    assert list(found.rows) == slots[:2]
    assert [allowed_ids(each) for each in found.rows.values()] == [LANGUAGE.allowed([])] * 2


def test_a_step_waits_for_the_tokens_of_the_step_before(bench: Bench) -> None:
    first, second = plan(bench), plan(bench)
    told = bounds(bench, first)
    assert told is not None and bounds(bench, second) is None
    output = bench.worker.launch(first.step, lambda: told).result()
    bench.scheduler.results.land(first, output, 0.0)
    found = bounds(bench, second)
    assert found is not None
    assert [allowed_ids(each) for each in found.rows.values()] == [
        LANGUAGE.allowed([token]) for token in output.tokens[:2]
    ]


def test_rows_of_requests_that_have_ended_wait_for_nothing(bench: Bench) -> None:
    first, second = plan(bench), plan(bench)
    told = bounds(bench, first)
    assert told is not None
    bench.abort((0, 0), (0, 1))
    found = bounds(bench, second)
    assert found is not None and list(found.rows.values()) == [None, None]
    bench.scheduler.results.land(first, bench.worker.launch(first.step, lambda: told).result(), 0.0)


def test_a_step_behind_one_that_failed_waits_for_nothing(bench: Bench) -> None:
    first, second = plan(bench), plan(bench)
    bench.scheduler.results.land_failed(first, 0.0, short_of_memory=False, behind=False)
    found = bounds(bench, second)
    assert found is not None and list(found.rows.values()) == [None, None]


def test_a_matcher_that_gives_up_ends_its_request_and_its_row_is_free() -> None:
    bench = Bench(config(), facts())
    for id, breaks in enumerate((-1, 0)):
        matcher = ToyMatcher(Language(shortest=20, breaks=breaks))
        add_to(bench.scheduler, 0, add(id, [id + 1], max_tokens=9), 0.0, matcher)
    outputs: OutputsByClient = {}
    found = bounds(bench, plan(bench), outputs)
    assert outputs == {0: [Failed(0, 400, "no bounds can be made")]}
    assert found is not None and [each is None for each in found.rows.values()] == [True, False]
