"""Requests of adapters in an engine, whose worker shows by its tokens which adapter computed what."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from adapted_engine import PROMPT, Bench
from driven import run, text
from fake_adapters import adapted_reference, adapter
from fake_worker import FakeExecutor, Landed, reference
from sizes import engine_config

from engine_core.adapters.messages import AdapterState
from engine_core.engine import Engine
from engine_core.features.adapters import adapter_table
from engine_core.features.adapters.adapter_table import PATIENCE
from engine_core.protocol import AddRequest, Failed, Tokens
from worker.calls.messages import AdapterFacts
from worker.protocol import Pooling, Sampling, StepBounds, StepInput

AWAY = {"max_loras": 2, "max_cpu_loras": 2}


@pytest.fixture
def bench(model: Path, tmp_path: Path) -> Callable[..., Bench]:
    return lambda **options: Bench(model, tmp_path / "adapters", **options)


def test_a_reload_under_the_same_name_finds_nothing_of_the_old_weights(
    bench: Callable[..., Bench],
) -> None:
    one = bench()
    old = one.adapter("x", 3)
    one.load(old)
    one.add(1, old)
    one.run()
    new = one.adapter("x", 4)
    one.load(new)
    one.add(2, new)
    one.run()
    assert (one.text(1), one.text(2)) == (adapted_reference(PROMPT, 4, 3), adapted_reference(PROMPT, 4, 4))
    assert one.cached(2) == 0
    one.add(3, old)  # it was sent before its server heard of the new one
    one.run()
    assert one.text(3) == one.text(2)
    assert one.table.stats.resident == 1
    one.table.drop("x", 0)
    one.add(4, old)
    one.run()
    [gone] = one.told[4]
    assert isinstance(gone, Failed)
    assert "unloaded meanwhile" in gone.message


def test_a_number_is_given_again_when_workers_have_dropped_its_adapter(
    bench: Callable[..., Bench],
) -> None:
    one = bench(max_loras=1, max_cpu_loras=1)
    one.load(one.adapter("x", 3))
    one.executor.holds = True
    new = one.adapter("x", 4)
    one.table.drop("x", 0)
    one.table.load(new)
    for _ in range(5):
        one.step()
    assert one.loaded == ["x"]  # or the order to drop, which waits for a step, could drop the new one
    one.executor.holds, one.executor.calls[-1].is_done = False, True
    one.add(1, new)
    one.run()
    assert one.text(1) == adapted_reference(PROMPT, 4, 4)


def test_prefixes_are_shared_by_what_adapters_hold_and_not_by_their_names(
    bench: Callable[..., Bench],
) -> None:
    one = bench()
    first, other = one.adapter("x", 3), one.adapter("z", 5)
    same = adapter(Path(first.folder), "y")
    one.load(first, same, other)
    for id, by in enumerate((first, same, other, None)):
        one.add(id, by)
        one.run()
    assert [one.cached(id) for id in range(4)] == [0, 12, 0, 0]
    assert one.text(1) == adapted_reference(PROMPT, 4, 3)
    assert one.text(3) == reference(PROMPT, 4)
    assert one.loaded == ["x", "z"]


def test_adapters_and_the_model_answer_in_one_step(bench: Callable[..., Bench]) -> None:
    one = bench()
    adapters = [None, *(one.adapter(str(shift), shift) for shift in range(1, 4))]
    one.load(*(each for each in adapters if each))
    for id, by in enumerate(adapters):
        one.add(id, by, most=6)
    one.run()
    assert [one.text(shift) for shift in range(4)] == [adapted_reference(PROMPT, 6, s) for s in range(4)]


def test_an_adapter_with_invocation_tokens_shares_what_lies_before_them(
    bench: Callable[..., Bench],
) -> None:
    one = bench()
    late = one.adapter("late", 7, invocation=(10, 11))
    one.load(late)
    one.add(1, None)
    one.run()
    one.add(2, late)  # 10 stands at position 9: the adapter computes from 10 on
    one.add(3, late, PROMPT[:9])
    one.run()
    assert one.text(2) == adapted_reference(PROMPT, 4, 7, since=10)
    assert one.cached(2) == 8
    assert one.text(3) == reference(PROMPT[:9], 4)
    assert one.cached(3) == 8


def test_a_request_waits_for_its_adapter_and_holds_nobody_up(bench: Callable[..., Bench]) -> None:
    one = bench()
    slow = one.adapter("slow", 2)
    one.executor.holds = True
    one.table.load(slow)
    one.add(1, slow)
    one.add(2, slow)
    one.add(3, None)
    for _ in range(20):
        one.step()
    assert one.text(3) == reference(PROMPT, 4)
    assert 1 not in one.told
    assert one.engine.stats().waiting == 2
    one.engine.abort(0, [2])
    one.executor.holds = False
    one.executor.calls[0].is_done = True
    one.run()
    assert one.text(1) == adapted_reference(PROMPT, 4, 2)
    assert one.loaded == ["slow"]
    assert text(one.told[2]) == []
    assert not one.table.keys()


def test_one_that_cannot_be_loaded_is_told_to_servers_and_those_who_wait(
    bench: Callable[..., Bench],
) -> None:
    one = bench()
    unfit = one.adapter("unfit", 2)
    Path(unfit.folder, "unfit").touch()
    one.table.load(unfit)
    one.add(1, unfit)
    one.run()
    [failed] = one.told[1]
    assert isinstance(failed, Failed)
    assert "adapter unfit cannot be loaded: q_proj has no place" in failed.message
    assert [(state.adapter.name, state.facts, state.error) for state in one.states] == [
        ("unfit", None, "q_proj has no place")
    ]
    Path(unfit.folder, "unfit").unlink()
    one.load(unfit)
    one.add(2, unfit)
    one.run()
    assert one.text(2) == adapted_reference(PROMPT, 4, 2)


def test_the_one_that_was_used_longest_ago_goes_and_comes_back(bench: Callable[..., Bench]) -> None:
    one = bench(**AWAY)
    a, b, c = (one.adapter(name, shift) for name, shift in (("a", 1), ("b", 2), ("c", 3)))
    one.load(a, b)
    one.add(1, a)
    one.run()
    one.load(c)
    assert one.loaded == ["a", "b", "c"]
    for id, by in enumerate((a, b, c, a), 2):
        one.add(id, by)
    one.run()
    assert one.loaded[:4] == ["a", "b", "c", "b"]
    assert one.text(3) == adapted_reference(PROMPT, 4, 2)
    assert [state.facts is not None for state in one.states] == [True, True, True]
    shutil.rmtree(a.folder)
    one.load(b, c)
    one.add(9, a)
    one.run()
    [failed] = one.told[9]
    assert isinstance(failed, Failed)
    assert failed.code == 503
    assert one.states[-1].error


def test_files_that_changed_are_not_loaded_under_the_old_digest(bench: Callable[..., Bench]) -> None:
    one = bench(max_loras=1, max_cpu_loras=1)
    a, b = one.adapter("a", 1), one.adapter("b", 2)
    one.load(a, b)
    one.adapter("a", 9)
    one.add(1, a)
    one.run()
    [failed] = one.told[1]
    assert isinstance(failed, Failed)
    assert "its files have changed since" in failed.message


def test_unloading_lets_requests_finish(bench: Callable[..., Bench]) -> None:
    one = bench()
    a = one.adapter("a", 1)
    one.load(a)
    one.add(1, a)
    one.step()
    one.table.drop("a", 0)
    one.run()
    assert one.text(1) == adapted_reference(PROMPT, 4, 1)
    assert one.table.stats.resident == 0
    assert not one.executor._worker.adapters.shifts  # pyright: ignore[reportPrivateUsage]
    assert one.states[-1] == AdapterState(a)
    one.table.drop("a", 0)


def test_who_uses_an_unloaded_adapter_goes_on_behind_other_weights(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = bench()
    a = one.adapter("a", 1)
    one.load(a)
    one.add(1, a)
    one.step()
    one.table.drop("a", 0)
    monkeypatch.setattr(Engine, "find_weights", lambda engine, folder: engine._load)  # they fit
    one.engine.update_weights("other")
    one.run()
    assert one.text(1) == adapted_reference(PROMPT, 4, 1)
    one.add(2, a)
    one.run()
    assert isinstance(one.told[2][0], Failed)


def test_steps_have_few_adapters_and_nobody_starves(bench: Callable[..., Bench]) -> None:
    one = bench(max_loras=2, max_cpu_loras=8)
    adapters = [one.adapter(str(shift), shift) for shift in range(1, 6)]
    one.load(*adapters)
    seen: list[int] = []
    launch = one.executor._worker.launch  # pyright: ignore[reportPrivateUsage]
    numbers: dict[int, int] = {}

    def note(step: StepInput, following: Callable[[], StepBounds] | None = None) -> Landed:
        numbers.update({new.slot: new.adapter for new in step.new})
        seen.append(len({numbers[row.slot] for row in step.seqs} - {0}))
        return launch(step, following)

    one.executor._worker.launch = note  # pyright: ignore[reportPrivateUsage]
    for id, by in enumerate([*adapters, None]):
        one.add(id, by, most=30)
    one.run()
    assert max(seen) == 2
    assert [one.text(id) for id in range(6)] == [
        adapted_reference(PROMPT, 30, shift) for shift in (1, 2, 3, 4, 5, 0)
    ]


def test_one_without_a_place_gets_one_though_the_others_are_always_in_use(
    bench: Callable[..., Bench],
) -> None:
    one = bench(**AWAY)
    a, b, late = (one.adapter(name, shift) for name, shift in (("a", 1), ("b", 2), ("late", 3)))
    one.load(a, b)
    one.add(0, a, most=8)
    one.add(1, b, most=8)
    one.step()
    one.table.load(late)
    one.add(2, late)
    for id in range(3, 3 + 8 * PATIENCE):
        one.add(id, (a, b)[id % 2], most=8)
        one.step()
        one.step()
    assert 2 in one.told
    one.run()
    assert one.text(2) == adapted_reference(PROMPT, 4, 3)
    for id in range(3, 3 + 8 * PATIENCE):
        assert one.text(id) == adapted_reference(PROMPT, 8, (1, 2)[id % 2])


def test_one_adapter_more_than_places_is_no_cliff(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in turn, as many requests at a time as there are places: few of them need a load."""
    one, now = bench(max_loras=4, max_cpu_loras=4), 0.0
    monkeypatch.setattr(adapter_table, "time", SimpleNamespace(monotonic=lambda: now))
    adapters = [one.adapter(str(shift), shift) for shift in range(1, 6)]
    one.load(*adapters)
    one.executor.holds, begun, done = True, 0, 0
    while done < 100:
        while begun < done + 4:
            one.add(begun, adapters[begun % 5], most=6)
            begun += 1
        one.step()
        now += 0.02
        for call in one.executor.calls:
            call.is_done = True
        ends = [each[-1] for each in one.told.values()]
        done = sum(isinstance(each, Tokens) and each.finish is not None for each in ends)
    assert 5 <= len(one.loaded) < 25
    assert one.text(4) == adapted_reference(PROMPT, 6, 5)


def test_a_better_rank_is_loaded_first_and_is_passed_by_nobody_of_a_worse_one(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a stream of requests for adapters that are there, with a clock that stands still."""
    monkeypatch.setattr(adapter_table, "time", SimpleNamespace(monotonic=lambda: 0.0))
    one = bench(**AWAY, scheduling_policy="priority")
    a, b, c, d, e = (one.adapter(name, shift) for shift, name in enumerate("abcde", 1))
    for each in (c, d, e, a, b):
        one.load(each)
    one.add(0, a, most=8, priority=5)
    one.add(1, b, most=8, priority=5)
    one.step()
    for id, (by, priority) in enumerate(((c, 7), (d, 5), (e, 3), (e, 9)), 2):
        one.add(id, by, priority=priority)
    for id in range(10, 20):  # fewer than may pass one of their own rank
        one.add(id, (a, b)[id % 2], most=8, priority=5)
        one.step()
        one.step()
    assert 4 in one.told and 2 not in one.told
    one.run()
    wanted = [name for name in one.loaded[5:] if name in "cde"]
    assert wanted == ["e", "d", "c"]
    assert [one.text(id) for id in (2, 3, 4, 5)] == [adapted_reference(PROMPT, 4, n) for n in (3, 4, 5, 5)]


def test_steps_have_the_adapters_of_the_best_rank(bench: Callable[..., Bench]) -> None:
    one = bench(max_loras=1, max_cpu_loras=3, scheduling_policy="priority")
    a, b, c = (one.adapter(name, shift) for shift, name in enumerate("abc", 1))
    one.load(a, b, c)
    one.add(0, a, most=30, priority=1)
    one.add(1, b, most=30, priority=1)
    for _ in range(4):
        one.step()
    one.add(2, c, most=8, priority=0)
    while 2 not in one.told or not one.told[2][-1].finish:  # pyright: ignore[reportAttributeAccessIssue]
        one.step()
    assert len(text(one.told.get(0, []))) + len(text(one.told.get(1, []))) < 16
    one.run()
    assert [one.text(id) for id in range(3)] == [
        adapted_reference(PROMPT, most, shift) for most, shift in ((30, 1), (30, 2), (8, 3))
    ]


def test_adapters_come_back_after_a_sleep(bench: Callable[..., Bench]) -> None:
    one = bench()
    a = one.adapter("a", 1)
    one.load(a)
    one.engine.fall_asleep()
    assert not one.engine.busy
    one.table.load(one.adapter("b", 2))
    assert not one.engine.busy
    one.engine.wake()
    one.executor._worker.adapters.shifts.clear()  # pyright: ignore[reportPrivateUsage]
    one.run()
    assert [state.adapter.name for state in one.table.all_states] == ["a", "b"]


def test_without_adapters_such_requests_are_refused(model: Path) -> None:
    engine = Engine.start(engine_config(model), lambda _: None, FakeExecutor)
    engine.add(0, AddRequest(id=1, tokens=[1], params=Sampling(max_tokens=1), adapter="x"))
    [failed] = run(engine)[1]
    assert isinstance(failed, Failed)
    assert failed.message == "the engine has no adapters"


def test_heads_of_adapters_may_be_asked_for_before_they_are_loaded_again(
    bench: Callable[..., Bench],
) -> None:
    one = bench()
    kinds, plain = one.adapter("kinds", 1), one.adapter("plain", 2)
    one.executor.holds = True
    one.table.load(kinds, AdapterFacts(100, ("classify",), {"classify": 3}))
    one.table.load(plain)
    for id, by in enumerate((kinds, plain, None)):
        digest = "" if by is None else by.digest
        one.engine.add(0, AddRequest(id=id, tokens=PROMPT, params=Pooling("classify"), adapter=digest))
    one.step()
    assert one.table.keys() == [(0, 0)]
    for id in (1, 2):
        [refused] = one.told[id]
        assert isinstance(refused, Failed)
        assert "no task classify" in refused.message
