"""Adapters that others replace under their names, in an engine whose worker shows which one computed what."""

from collections.abc import Callable
from pathlib import Path

import pytest
from adapted_engine import PROMPT, Bench
from fake_adapters import adapted_reference
from msgspec.structs import replace

from worker.calls.messages import AdapterFacts


@pytest.fixture
def bench(model: Path, tmp_path: Path) -> Callable[..., Bench]:
    return lambda **options: Bench(model, tmp_path / "adapters", **options)


def test_an_adapter_answers_until_the_one_that_replaces_it_is_loaded(bench: Callable[..., Bench]) -> None:
    one = bench(max_loras=2, max_cpu_loras=2)
    old, new = one.adapter("x", 3), replace(one.adapter("new", 4), name="x")
    one.load(old)
    one.executor.holds = True
    one.table.load(new)
    one.step()
    one.add(1, old)
    one.step()
    one.executor.holds = False
    one.executor.calls[-1].is_done = True
    one.run()
    assert one.text(1) == adapted_reference(PROMPT, 4, 3)
    assert one.table.stats.resident == 1
    unfit = replace(one.adapter("wrong", 5), name="x")
    (Path(unfit.folder) / "unfit").touch()
    one.load(unfit)
    assert one.states[-1].error
    one.add(2, new)
    one.run()
    assert one.text(2) == adapted_reference(PROMPT, 4, 4)


def test_requests_that_wait_for_an_adapter_are_answered_by_the_one_that_replaces_it(
    bench: Callable[..., Bench],
) -> None:
    one = bench(max_loras=1, max_cpu_loras=1)
    old, new = one.adapter("x", 3), replace(one.adapter("new", 4), name="x")
    one.load(old)
    one.table.load(new)
    one.executor.holds = True  # the only place is the new one's
    one.step()
    one.add(1, old)
    one.step()
    one.executor.holds = False
    one.executor.calls[-1].is_done = True
    one.run()
    assert one.text(1) == adapted_reference(PROMPT, 4, 4)
    assert one.loaded == ["x", "new"]


def test_of_two_orders_for_a_name_the_later_one_counts_and_both_are_answered(
    bench: Callable[..., Bench],
) -> None:
    one = bench()
    first, second = one.adapter("x", 3), replace(one.adapter("new", 4), name="x")
    one.table.load(first)
    one.load(second)
    assert {state.adapter.digest for state in one.states} == {first.digest, second.digest}
    assert [state.adapter for state in one.table.all_states] == [second]


def test_the_order_that_was_given_later_counts_though_it_comes_first(bench: Callable[..., Bench]) -> None:
    one = bench()
    late, other = replace(one.adapter("x", 3), ordered=5), replace(one.adapter("new", 4), name="x", ordered=7)
    one.load(other, late)
    assert {state.adapter: state.facts is not None for state in one.states} == {other: True, late: False}
    one.table.load(late, AdapterFacts(bytes=1))  # a server restores it that has not heard of the other
    one.add(1, late)
    one.run()
    assert one.text(1) == adapted_reference(PROMPT, 4, 4) and len(one.states) == 2
    one.table.drop("x", 6)
    assert [state.adapter for state in one.table.all_states] == [other]
    one.table.drop("x", 8)
    one.load(other)  # a server that has not heard of that restores it
    assert not one.table.all_states
