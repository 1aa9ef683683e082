"""Who gets in, who is refused, and after how many seconds to try again."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from engine_core.engine_stats import Rates, Stats
from server.access.admission import (
    DEFAULT_QUEUE,
    DEFAULT_QUEUED_TOKENS,
    Admission,
    Admissions,
)
from server.access.client_identity import ANYONE, Caller
from server.access.retry_after import FIRST_GUESS, MAX_WAIT
from server.errors import BadRequest, Overloaded, TooManyRequests

A, B, C = Caller("a"), Caller("b"), Caller("c", weight=2.0)
RATES = Rates(prompt_rate=1000.0, step=0.01, step_rows=4, step_prompts=100.0, stop_rate=0.0)


def stats(running: int = 0, waiting: int = 0, wait: float = 0.0, rates: Rates | None = RATES) -> Stats:
    return Stats(running, waiting, 0.0, 0, 0, 0, 0, 0, expected_wait=wait, rates=rates)


@dataclass
class Engines:
    stats: Stats | None = None
    aborted: list[int] = field(default_factory=list)

    def abort(self, ids: Iterable[int], /) -> None:
        self.aborted += ids

    async def standing(self, id: int, /) -> None:
        """It tells nothing of any request."""


@dataclass
class House:
    """Admissions with four slots."""

    queue: int | None = 2
    tokens: int | None = None
    engines: Engines = field(default_factory=Engines)
    refused: int = 0

    def __post_init__(self) -> None:
        self.admissions = Admissions(self.queue, self.tokens, self.engines, self.refuse)
        self.admissions.slots = 4

    def refuse(self) -> None:
        self.refused += 1

    def admit(self, caller: Caller = ANYONE, count: int = 1) -> Admission:
        return self.admissions.admit(caller, count)

    def live(self, *callers: Caller) -> list[int]:
        owners = self.admissions._owners  # pyright: ignore[reportPrivateUsage]
        return [owners[caller.owner].live if caller.owner in owners else 0 for caller in callers]


@pytest.mark.parametrize(
    ("new", "live", "reported", "refused"),
    [
        (1, 5, 0, False),  # 4 slots: one of them waits, and so would the new one
        (1, 6, 0, True),
        (3, 4, 0, True),
        (1, 1, 1, False),  # the engine waits for cache while slots are free
        (1, 2, 2, True),
        (6, 0, 0, False),
    ],
)
def test_requests_beyond_the_limit_are_refused(new: int, live: int, reported: int, refused: bool) -> None:
    house = House(engines=Engines(stats(waiting=reported)))
    if live:
        house.admit(count=live)
    if refused:
        with pytest.raises(Overloaded, match="currently busy"):
            house.admit(count=new)
    else:
        house.admit(count=new)
    assert house.refused == refused
    assert house.admissions.live == live + (0 if refused else new)


def test_what_could_never_get_in_is_not_told_to_try_again() -> None:
    house = House()
    with pytest.raises(BadRequest, match="for 7 answers at once, and this server holds 6 at most"):
        house.admit(count=7)


def test_the_queue_has_a_limit_if_none_is_given() -> None:
    house = House(queue=None)
    house.admit(count=DEFAULT_QUEUE + 3)
    house.admissions.check_room(ANYONE)
    house.admit()
    with pytest.raises(Overloaded):
        house.admissions.check_room(ANYONE)


def test_places_are_given_back_once() -> None:
    house = House()
    one = house.admit(count=3)
    assert not house.admissions.idle.is_set()
    one.shrink(1)
    one.shrink(2)
    assert house.admissions.live == 1
    one.release()
    one.release()
    assert house.admissions.live == 0 and house.admissions.idle.is_set()
    assert house.live(ANYONE) == [0]


def test_an_id_is_free_until_it_is_taken_and_again_when_its_request_has_left() -> None:
    house = House()
    first, second, third = (house.admit() for _ in range(3))
    assert first.take_id("a") == "a"
    other = second.take_id("a")
    assert other != "a" and other.startswith("a-") and third.take_id("a") not in ("a", other)
    first.release()
    assert house.admit().take_id("a") == "a"


def test_programs_may_give_several_requests_the_same_id() -> None:
    house = House()
    first, second = house.admit(), house.admit()
    first.set_id("a")
    second.set_id("a")
    assert house.admissions.by_id == {"a": [first, second]}
    first.release()
    assert house.admissions.by_id == {"a": [second]}
    second.release()
    assert house.admissions.by_id == {}


def test_a_newcomer_gets_the_place_of_the_newest_that_waits() -> None:
    house = House()
    older, *_, newest = [house.admit(A) for _ in range(6)]
    newest.streams.update([7, 8])
    house.admissions.check_room(B)
    house.admit(B)
    assert house.live(A, B) == [5, 1]
    assert isinstance(newest.refusal, TooManyRequests) and older.refusal is None
    assert sorted(house.engines.aborted) == [7, 8]
    with pytest.raises(TooManyRequests):
        newest.check()
    newest.release()
    assert house.live(A, B) == [5, 1]


def test_who_has_more_than_its_share_of_a_full_server_is_told_so() -> None:
    house = House()
    for _ in range(3):
        house.admit(A)
    for _ in range(3):
        house.admit(B)
    for caller in (A, B):
        for decide in (lambda: house.admissions.check_room(caller), lambda: house.admit(caller)):  # noqa: B023
            with pytest.raises(TooManyRequests, match="your share of it is 3 answers"):
                decide()
    house.admissions.check_room(C)  # may have three by its weight
    house.admit(C, count=2)
    assert house.live(A, B, C) == [2, 2, 2]


def test_a_share_is_as_large_as_the_weight() -> None:
    house = House(queue=5)
    for _ in range(9):
        house.admit(A)
    for _ in range(6):
        house.admit(C)
    assert house.live(A, C) == [3, 6]
    with pytest.raises(TooManyRequests, match="share of it is 6"):
        house.admit(C)


def test_while_there_is_room_nobody_needs_a_share() -> None:
    house = House()
    house.admit(A, count=1)
    for _ in range(5):
        house.admit(B)
    assert house.live(A, B) == [1, 5] and not house.refused


def test_what_has_begun_is_not_ended_for_others() -> None:
    house = House()
    for _ in range(6):
        house.admit(A).begin_work(5, 10).begin()
    with pytest.raises(Overloaded):
        house.admit(B)
    assert house.live(A, B) == [6, 0]


def test_a_single_request_is_not_ended_for_another_of_the_same_size() -> None:
    house = House(queue=0)
    callers = [Caller(f"client {i}") for i in range(5)]
    for caller in callers[:4]:
        house.admit(caller)
    with pytest.raises(Overloaded):
        house.admit(callers[4])
    assert house.live(*callers) == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("seed", range(20))
def test_nobody_loses_what_is_its_share(seed: int) -> None:
    """Whatever comes and goes, the counts are right, and who has less than its share loses nothing."""
    rng = random.Random(seed)
    house = House(queue=rng.randint(0, 20))
    callers = [Caller(f"client {i}", rng.choice([1.0, 2.0, 0.5])) for i in range(4)]
    held: list[tuple[Caller, Admission]] = []
    for _ in range(400):
        caller, count = rng.choice(callers), rng.choice([1, 1, 2, 5])
        before = {each.owner: house.live(each)[0] for each in callers}
        if held and rng.random() < 0.4:
            held.pop(rng.randrange(len(held)))[1].release()
            continue
        try:
            held.append((caller, house.admit(caller, count)))
        except (Overloaded, TooManyRequests, BadRequest):
            assert house.admissions.live + count > house.admissions.most
            assert {each.owner: house.live(each)[0] for each in callers} == before
        weights = sum(each.weight for each in callers if before[each.owner] or each is caller)
        for each in callers:
            if each is not caller and house.live(each)[0] < before[each.owner]:
                assert before[each.owner] > house.admissions.most * each.weight / weights
        held = [(owner, one) for owner, one in held if one.refusal is None]
        assert house.admissions.live == sum(one.count for _, one in held) <= house.admissions.most


def test_tokens_that_wait_are_bounded_but_for_the_first_ones() -> None:
    house = House(tokens=100)
    first = house.admit()
    first.check_tokens(1000)
    work = first.begin_work(50, 10)
    second = house.admit()
    second.check_tokens(50)
    with pytest.raises(Overloaded, match="token backlog"):
        second.check_tokens(51)
    work.begin()
    second.check_tokens(51)
    work.end()
    default = House().admit()
    default.begin_work(1)
    with pytest.raises(Overloaded):
        default.check_tokens(DEFAULT_QUEUED_TOKENS)


def retry_after(house: House, caller: Caller = ANYONE) -> str:
    with pytest.raises((Overloaded, TooManyRequests)) as caught:
        house.admit(caller)
    return caught.value.headers()["Retry-After"]


def test_the_time_to_wait_is_that_of_the_tokens_ahead() -> None:
    house = House()
    for _ in range(6):
        house.admit().begin_work(prompt=4000, most=400)
    assert retry_after(house) == str(FIRST_GUESS)  # no engine has told its rates
    house.engines.stats = stats()
    # 24,000 tokens to read take 24 s, and the 600 steps of 2,400 tokens to generate 6 s.
    assert retry_after(house) == "30"
    house.engines.stats = stats(running=4, waiting=2, wait=12.3)
    assert retry_after(house) == "13"  # the engine knows all of them, and knows better
    house.engines.stats = stats(running=4, waiting=1, wait=12.3)
    assert retry_after(house) == "30"  # it does not know all yet
    slow = Rates(prompt_rate=1.0, step=0.01, step_rows=4, step_prompts=100.0, stop_rate=0.0)
    house.engines.stats = stats(rates=slow)
    assert retry_after(house) == str(MAX_WAIT)


def test_answers_that_may_stop_are_expected_to_be_shorter() -> None:
    house = House()
    rates = Rates(prompt_rate=1e9, step=0.01, step_rows=1, step_prompts=100.0, stop_rate=0.01)
    house.engines.stats = stats(rates=rates)
    for _ in range(6):
        house.admit().begin_work(prompt=1, most=4000, may_stop=True)
    assert retry_after(house) == "7"  # a hundred tokens each, and a little


def test_who_is_over_its_share_waits_for_its_own_requests() -> None:
    house = House()
    house.engines.stats = stats()
    house.admit(A, 2).begin_work(prompt=1000)
    house.admit(B, 4).begin_work(prompt=9000)
    assert retry_after(house, B) == "11"  # all is done by then
    small = House()
    small.engines.stats = stats()
    small.admit(A, 3).begin_work(prompt=1000)
    small.admit(B, 3).begin_work(prompt=9000)
    assert retry_after(small, A) == "3"  # half of the engine for two seconds


# A caller of which only so many answers may wait: what runs, or could, does not count.


@pytest.fixture
def queued() -> Admissions:
    return House(queue=1000).admissions


def test_so_many_wait_behind_those_that_run(queued: Admissions) -> None:
    alice = Caller("alice", max_queued=2)
    live = [queued.admit(alice, 1) for _ in range(6)]
    for refused in (queued.check_room, queued.take_free_place, lambda caller: queued.admit(caller, 1)):
        with pytest.raises(TooManyRequests, match="2 answers may wait at most") as caught:
            refused(alice)
        assert caught.value.body()["error"]["code"] == "rate_limit_exceeded"  # type: ignore[index]
        assert int(caught.value.headers()["Retry-After"]) >= 1
    queued.admit(B, 50)
    live[0].release()
    with pytest.raises(TooManyRequests):
        queued.admit(alice, 1)  # others have the slots now


def test_without_a_queue_it_may_still_run(queued: Admissions) -> None:
    alice = Caller("alice", max_running=2, max_queued=0)
    first = queued.admit(alice, 2)
    with pytest.raises(TooManyRequests):
        queued.admit(alice, 1)
    first.release()
    assert queued.take_free_place(alice) is not None


def test_what_has_begun_does_not_wait_though_others_came(queued: Admissions) -> None:
    alice = Caller("alice", max_queued=1)
    queued.admit(alice, 2).begin_work(1).begin()
    queued.admit(B, 100)
    queued.admit(alice, 1)
    with pytest.raises(TooManyRequests):
        queued.admit(alice, 1)


def test_a_place_that_is_taken_at_the_head_counts_once(queued: Admissions) -> None:
    alice = Caller("alice", max_running=1, max_queued=2)
    taken = queued.take_free_place(alice)
    assert taken is not None
    assert queued.admit(alice, 3, taken).count == 3
    with pytest.raises(TooManyRequests):
        queued.check_room(alice)


def test_what_could_never_wait_is_told_so(queued: Admissions) -> None:
    with pytest.raises(BadRequest, match="your API key may have 3 at most"):
        queued.admit(Caller("alice", max_running=1, max_queued=2), 4)
    assert queued.most_for(B) == queued.most


def test_others_have_no_queue_of_their_own(queued: Admissions) -> None:
    queued.admit(Caller("alice", max_queued=0), 4)
    queued.admit(B, 500)
