"""An owner of which only so many sequences may run: its others wait, and those of others overtake them."""

import pytest
from scheduler_bench import add, pool
from scripted_clock import STEP, TOKEN, Clock

from engine_core.protocol import AddRequest, Failed


def of(owner: str, id: int, most: int = 0, max_tokens: int = 20, **changes: object) -> AddRequest:
    return add(id, [1 + id % 40] * 8, max_tokens=max_tokens, owner=owner, max_running=most, **changes)


def running(clock: Clock, owner: str) -> int:
    return sum(seq.owner.name == owner for seq in clock.scheduler.running)


@pytest.mark.parametrize("most", [1, 3])
def test_so_many_run_and_all_are_answered(most: int) -> None:
    clock = Clock(slots=8)
    clock.add_all(of("capped", id, most) for id in range(20))
    seen = set[int]()
    while clock.step():
        seen.add(running(clock, "capped"))
    assert max(seen) == most
    assert len(clock.outputs) == 20 and not clock.scheduler.live and not clock.scheduler.waiting.count


def test_others_overtake() -> None:
    clock = Clock(slots=4)
    clock.add_all(of("capped", id, 1, max_tokens=100) for id in range(20))
    clock.step()
    clock.add_all(of("other", id) for id in range(100, 103))
    clock.step()
    assert (running(clock, "capped"), running(clock, "other")) == (1, 3)
    while any(key[1] >= 100 for key in clock.scheduler.live):
        clock.step()
    assert sum(id < 100 for id in clock.outputs) == 1


def test_texts_count_too() -> None:
    clock = Clock(slots=8)
    clock.add_all(pool(id, [1 + id] * 8, owner="capped", max_running=2) for id in range(6))
    most = 0
    while clock.step():
        assert clock.planned is not None
        most = max(most, len(clock.planned.seqs))
    assert most == 2 and len(clock.outputs) == 6


def test_a_new_limit_counts_from_the_next_request_on() -> None:
    clock = Clock(slots=8)
    clock.add_all(of("capped", id, 1, max_tokens=300) for id in range(10))
    clock.step()
    assert running(clock, "capped") == 1
    clock.add(of("capped", 10, 4))
    clock.step()
    assert running(clock, "capped") == 4
    clock.add(of("capped", 11, 2))
    clock.step()
    assert running(clock, "capped") == 4, "what runs goes on"
    clock.scheduler.abort([(0, seq.key[1]) for seq in clock.scheduler.running[:3]], clock.now)
    clock.step()
    assert running(clock, "capped") == 2
    clock.add(of("capped", 12))
    clock.step()
    assert running(clock, "capped") == 8
    clock.run()


def test_those_that_are_aborted_or_preempted_make_room() -> None:
    clock = Clock(slots=8)
    clock.add_all(of("capped", id, 2, max_tokens=100) for id in range(4))
    clock.step()
    first, second = clock.scheduler.running
    clock.scheduler.abort([first.key], clock.now)
    clock.scheduler.paused.pause([second.key])
    clock.step()
    assert running(clock, "capped") == 2, "a paused one keeps its slot"
    clock.scheduler.paused.resume([second.key])
    clock.run()


def test_the_expected_wait_knows_the_limit() -> None:
    """A request that waits for others of its owner is told when its turn comes; others are let in."""
    clock = Clock(slots=8)
    steps = 200
    clock.add_all(of("capped", id, 1, max_tokens=steps, streams=True) for id in range(3))
    clock.steps(3)
    last = clock.add(of("capped", 3, 1, streams=True))
    other = clock.add(of("other", 4, streams=True))
    assert other is None, "it need not wait"
    assert last is not None and not isinstance(last, Failed)
    at_least = 3 * (steps - 10) * (STEP + TOKEN)
    assert at_least <= last.expected <= 2 * at_least
    clock.run()
