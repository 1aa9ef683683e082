"""The engine is divided among owners: by weight, with nothing saved up, and nobody shut out."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from fake_worker import facts, reference
from scheduler_bench import Bench, add, config, pool
from scripted_clock import STEP, TOKEN, Clock

from engine_core.protocol import AddRequest, Tokens
from engine_core.scheduling.queue.shares import Owners, WorkClass

FIRST = WorkClass.FIRST_TOKEN


def short(id: int, owner: str, **changes: object) -> AddRequest:
    return add(id, [1 + id % 40] * 8, max_tokens=4, owner=owner, **changes)


def long(id: int, owner: str, prompt: int = 8, max_tokens: int = 500, **changes: object) -> AddRequest:
    return add(id, [1 + id % 40] * prompt, max_tokens=max_tokens, owner=owner, **changes)


def latency(clock: Clock, request: AddRequest) -> float:
    """The seconds from now to the end of this request."""
    at = clock.now
    clock.add(request)
    while request.id in {key[1] for key in clock.scheduler.live}:
        clock.step()
    return clock.outputs[request.id][-1][0] - at


def base() -> float:
    return latency(Clock(slots=8), short(1, "alone"))


@pytest.mark.parametrize("crowd", [short, long])
@pytest.mark.parametrize("steps", [0, 1, 7, 100])
def test_one_request_beside_a_thousand_of_another_owner(crowd: type[AddRequest], steps: int) -> None:
    clock = Clock(slots=8)
    clock.add_all(crowd(id, "crowd") for id in range(1000, 2000))
    clock.steps(steps)
    step = STEP + 8 * 8 * TOKEN  # eight prompts
    assert latency(clock, short(1, "single")) <= 2 * base() + step


def test_a_single_request_gets_a_slot_though_all_are_taken_for_long() -> None:
    clock = Clock(slots=4)
    clock.add_all(long(id, "crowd") for id in range(1000, 1040))
    clock.steps(50)
    assert latency(clock, short(1, "single")) < 20 * STEP
    preempted = clock.scheduler.counters.preemptions
    assert preempted == 1
    for id in range(2, 10):
        assert latency(clock, short(id, "single")) < 20 * STEP
    assert clock.scheduler.counters.preemptions <= preempted + 8, "one each, at most"


@pytest.mark.parametrize("steps", range(10))
def test_a_text_gets_the_slot_that_was_freed_for_it(steps: int) -> None:
    """The turn may be that of the class of what was preempted for a text: it does not get the slot back."""
    clock = Clock(slots=4)
    clock.add_all(long(id, "crowd") for id in range(1000, 1040))
    clock.steps(10)
    clock.scheduler._shares.charge(WorkClass.POOLING, 1.0)  # pyright: ignore[reportPrivateUsage]
    clock.steps(steps)
    assert latency(clock, pool(1, [7] * 8, owner="single")) < 5 * STEP
    assert clock.scheduler.counters.preemptions == 1


@pytest.mark.parametrize("crowd", [3, 20])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_long_prompts_of_another_owner_delay_a_short_one_by_one_step(crowd: int, steps: int) -> None:
    clock = Clock(gap_ms=0, slots=8)
    clock.add_all(long(id, "crowd", prompt=4000, max_tokens=4) for id in range(1000, 1000 + crowd))
    clock.steps(steps)
    whole = STEP + 2048 * TOKEN
    clock.add(short(1, "single"))
    at = clock.now
    while 1 not in clock.outputs:
        clock.step()
    assert clock.outputs[1][0][0] - at <= whole + STEP


@pytest.mark.parametrize(
    ("kind", "slots"),
    [("decode", 4), ("prompts", 8), ("mixed", 8), ("texts", 4), ("mixed", 64), ("texts", 64)],
)
def test_tokens_are_divided_as_the_weights_are(kind: str, slots: int) -> None:
    clock, rng = Clock(slots=slots, gap_ms=0), random.Random(slots)
    ids = itertools.count(1)
    computed: Counter[str] = Counter()

    def request(owner: str) -> AddRequest:
        id, weight = next(ids), {"small": 1.0, "large": 3.0}[owner]
        if kind == "texts":
            return pool(id, [id % 40 + 1] * rng.randint(20, 400), owner=owner, weight=weight)
        prompt = rng.randint(4, 20) if kind == "decode" else rng.randint(50, 300)
        answer = rng.randint(1, 4) if kind == "prompts" else rng.randint(10, 60)
        return long(id, owner, prompt, answer, weight=weight)

    began = clock.now
    while clock.now < began + 20:
        for owner in ("small", "large"):
            here = clock.scheduler.owners.active.get(owner)
            clock.add_all(request(owner) for _ in range(2 * slots - (sum(here.live) if here else 0)))
        clock.step()
        assert clock.planned is not None
        if clock.now > began + 10:
            for seq, row in zip(clock.planned.seqs, clock.planned.step.seqs, strict=True):
                computed[seq.request.owner] += row.count
    assert 0.95 < computed["large"] / (3 * computed["small"]) < 1.05


def sequences_computed(clock: Clock, steps: int = 300) -> Counter[str]:
    """How many rows of the next steps each owner has."""
    computed: Counter[str] = Counter()
    for _ in range(steps):
        clock.step()
        assert clock.planned is not None
        computed.update(seq.request.owner for seq in clock.planned.seqs)
    return computed


def test_an_owner_that_was_away_does_not_get_what_it_missed() -> None:
    clock = Clock(slots=4)
    clock.add_all(long(id, "here", max_tokens=50) for id in range(1000, 1100))
    clock.add(short(1, "away"))
    clock.steps(300)
    clock.add_all(long(id, "away", max_tokens=50) for id in range(2000, 2100))
    computed = sequences_computed(clock)
    assert 0.9 < computed["away"] / computed["here"] < 1.1


def test_what_an_owner_used_while_it_was_alone_is_not_held_against_it() -> None:
    clock = Clock(slots=4)
    clock.add_all(long(id, "first", max_tokens=50) for id in range(1000, 1020))
    clock.run()
    for id in range(2000, 2100):
        clock.add(long(id, "second", max_tokens=50))
        clock.add(long(id + 1000, "first", max_tokens=50))
    computed = sequences_computed(clock)
    assert 0.9 < computed["first"] / computed["second"] < 1.1


def test_who_leaves_for_a_moment_takes_no_more_than_its_part() -> None:
    """An owner that asks again after each answer, and is away in between, keeps its count."""
    owners = Owners()
    busy = owners.enter(short(1, "busy"), FIRST)
    coming = owners.enter(short(2, "coming"), FIRST)
    coming.used[FIRST] += 100
    owners.leave(coming, FIRST)
    busy.used[FIRST] += 10
    again = owners.enter(short(3, "coming"), FIRST)
    assert (again.used[FIRST], busy.used[FIRST]) == (100, 10)
    newcomer = owners.enter(short(4, "new"), FIRST)
    assert newcomer.used[FIRST] == 10
    for owner in (again, busy, newcomer):
        owners.leave(owner, FIRST)
    assert owners.enter(short(5, "busy"), FIRST).used[FIRST] == 100, "all begin alike"


def test_weights_may_change_while_requests_run() -> None:
    owners = Owners()
    one = owners.enter(short(1, "a"), FIRST)
    other = owners.enter(short(2, "b"), FIRST)
    owners.enter(short(3, "a", weight=3.0), FIRST)
    assert (one.part, other.part) == (0.75, 0.25)
    owners.leave(other, FIRST)
    assert one.part == 1


def test_idle_owners_are_not_remembered_for_ever() -> None:
    owners = Owners()
    owners.enter(short(1, "stays"), FIRST)
    for id in range(10_000):
        owners.leave(owners.enter(short(2, f"passes {id}"), FIRST), FIRST)
    assert len(owners._idle) <= 4096  # pyright: ignore[reportPrivateUsage]


def test_memory_is_not_taken_from_who_has_less() -> None:
    """The owner with the most sequences gives some up if the cache is short, and all answers are right."""
    bench = Bench(config(), facts(num_blocks=36, block_size=4, max_num_seqs=8))
    crowd = [long(id, "crowd", prompt=9, max_tokens=60) for id in range(10, 20)]
    bench.add_all(crowd)
    bench.steps(20)
    single = long(1, "single", prompt=8, max_tokens=40)
    bench.add(single)
    steps = 0
    while 1 in {key[1] for key in bench.scheduler.live}:
        steps += bench.step()
    assert steps < 100 and bench.preemptions(1) == 0
    bench.run()
    for request in [single, *crowd]:
        assert bench.text(request.id) == reference(request.tokens, request.params.max_tokens)  # pyright: ignore


def test_background_work_of_one_does_not_stop_what_others_wait_for() -> None:
    clock = Clock(slots=2)
    clock.add_all(long(id, "reader") for id in (1, 2))
    clock.steps(5)
    clock.add(short(3, "machine", priority=1))
    clock.steps(50)
    assert not clock.scheduler.counters.preemptions


def test_a_request_is_told_its_own_wait() -> None:
    clock = Clock(slots=8)
    clock.add_all(long(id, "crowd", max_tokens=100) for id in range(1000, 1100))
    clock.steps(20)
    clock.add(short(1, "single"))
    clock.add(short(2, "crowd"))
    waits = [clock.scheduler.live[0, id].record.expected for id in (1, 2)]
    at = clock.now
    clock.run()
    first, second = (clock.outputs[id][0][0] - at for id in (1, 2))
    assert waits[0] is not None and waits[0] < 0.1 and first < 0.1
    assert waits[1] == pytest.approx(second, rel=0.25)


def test_the_last_of_many_waits_for_its_owners_part() -> None:
    clock = Clock(slots=8)
    clock.add_all(long(id, "crowd", max_tokens=100) for id in range(1000, 1100))
    clock.add_all(long(id, "some", max_tokens=100) for id in range(1, 21))
    told, at = clock.scheduler.live[0, 20].record.expected, clock.now
    clock.run()
    first = clock.outputs[20][0][1]
    assert isinstance(first, Tokens) and told is not None
    assert 0.5 < told / (clock.outputs[20][0][0] - at) < 2
