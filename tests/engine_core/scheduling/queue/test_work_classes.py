"""Classes of work share time by weight, and one that was idle has no claim on the past."""

from collections import Counter

from engine_core.protocol import AddRequest
from engine_core.scheduling.queue.shares import WEIGHTS, TimeShares, WorkClass, class_of
from worker.protocol import Pooling, Sampling

FIRST, POOLING, BACKGROUND = WorkClass


def serve(
    shares: TimeShares, classes: set[WorkClass], turns: int, seconds: float = 1.0
) -> Counter[WorkClass]:
    served: Counter[WorkClass] = Counter()
    for _ in range(turns):
        shares.begin_step(classes)
        turn = shares.whose_turn(classes)
        shares.charge(turn, seconds)
        served[turn] += 1
    return served


def test_time_goes_by_weight_and_nobody_starves() -> None:
    served = serve(TimeShares(), set(WorkClass), 10 * sum(WEIGHTS))
    assert all(abs(served[each] - 10 * WEIGHTS[each]) <= 1 for each in WorkClass)


def test_who_works_alone_gets_all() -> None:
    assert serve(TimeShares(), {BACKGROUND}, 5) == {BACKGROUND: 5}


def test_who_was_idle_gets_its_share_from_now_on_only() -> None:
    shares = TimeShares()
    serve(shares, {BACKGROUND}, 1000)
    served = serve(shares, {FIRST, POOLING}, 240)
    assert abs(served[FIRST] - 160) <= 2
    served = serve(shares, {FIRST, BACKGROUND}, 170)
    assert abs(served[FIRST] - 160) <= 2


def test_a_class_is_decided_by_priority_and_then_by_task() -> None:
    params = Sampling(max_tokens=1)
    assert class_of(AddRequest(id=1, tokens=[1], params=params)) is FIRST
    assert class_of(AddRequest(id=1, tokens=[1], params=params, priority=-5)) is FIRST
    assert class_of(AddRequest(id=1, tokens=[1], params=Pooling(task="embed"))) is POOLING
    assert class_of(AddRequest(id=1, tokens=[1], params=Pooling(task="embed"), priority=1)) is BACKGROUND
    assert class_of(AddRequest(id=1, tokens=[1], params=params, priority=7)) is BACKGROUND
