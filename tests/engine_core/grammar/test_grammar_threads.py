from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from llguidance import LLExecutor

from engine_core.grammar import grammar_threads
from engine_core.grammar.grammar_threads import GrammarJob, GrammarThreads

LONG = 20.0


class Held:
    """Work that runs until it is let go."""

    def __init__(self) -> None:
        self.begun, self.free = threading.Event(), threading.Event()

    def __call__(self, job: GrammarJob[int], executor: LLExecutor) -> int:
        self.begun.set()
        assert self.free.wait(LONG)
        return 7


@pytest.fixture
def held() -> Iterator[Callable[[], Held]]:
    made: list[Held] = []

    def make() -> Held:
        made.append(Held())
        return made[-1]

    yield make
    for one in made:
        one.free.set()


def quick(job: GrammarJob[int], executor: LLExecutor) -> int:
    return 1


def test_a_job_gives_its_outcome_or_raises_its_error() -> None:
    threads = GrammarThreads(1, 1, lambda: None)
    job = threads.submit("", quick)
    assert job.wait(LONG) and job.outcome() == 1

    def wrong(job: GrammarJob[int], executor: LLExecutor) -> int:
        raise ValueError("no")

    failed = threads.submit("", wrong)
    assert failed.wait(LONG)
    with pytest.raises(ValueError, match="no"):
        failed.outcome()


def test_an_owner_with_much_work_does_not_delay_another(held: Callable[[], Held]) -> None:
    threads, order, first = GrammarThreads(1, 1, lambda: None), list[str](), held()
    blocked = threads.submit("many", first)
    assert first.begun.wait(LONG)

    def note(name: str) -> Callable[[GrammarJob[None], LLExecutor], None]:
        return lambda job, executor: order.append(name)

    jobs = [threads.submit("many", note(f"many {number}")) for number in range(3)]
    jobs.append(threads.submit("one", note("one")))
    first.free.set()
    assert blocked.wait(LONG) and all(job.wait(LONG) for job in jobs)
    assert order.index("one") <= 1


def test_a_job_does_not_wait_behind_one_that_was_submitted_just_before(held: Callable[[], Held]) -> None:
    threads, work = GrammarThreads(2, 1, lambda: None), held()
    assert threads.submit("", quick).wait(LONG)  # its thread becomes idle, and counts until it has woken
    threads.submit("bad", work)
    assert threads.submit("good", quick).wait(LONG)


def test_an_owner_has_only_so_many_threads(held: Callable[[], Held]) -> None:
    threads, works = GrammarThreads(4, 2, lambda: None), [held() for _ in range(3)]
    for work in works:
        threads.submit("many", work)
    assert works[0].begun.wait(LONG) and works[1].begun.wait(LONG)
    assert threads.submit("other", quick).wait(LONG)
    assert not works[2].begun.is_set()


def test_what_is_left_alone_keeps_no_place_but_is_held_against_its_owner(held: Callable[[], Held]) -> None:
    threads, works = GrammarThreads(1, 1, lambda: None), [held(), held()]
    for work in works:
        assert not threads.refuses("bad")
        job = threads.submit("bad", work)
        assert work.begun.wait(LONG)
        threads.abandon(job)
    assert threads.refuses("bad") and not threads.refuses("good")
    assert threads.submit("good", quick).wait(LONG)
    for work in works:
        work.free.set()
    for thread in threading.enumerate():
        if isinstance(thread, grammar_threads.GrammarThread) and thread._threads is threads:  # pyright: ignore[reportPrivateUsage]
            thread.join(0.5)
    assert not threads.refuses("bad")


def test_what_was_not_begun_is_never_begun(held: Callable[[], Held]) -> None:
    threads, first, second = GrammarThreads(1, 1, lambda: None), held(), held()
    threads.submit("", first)
    assert first.begun.wait(LONG)
    threads.abandon(threads.submit("", second))
    first.free.set()
    assert threads.submit("", quick).wait(LONG) and not second.begun.is_set()


def test_only_jobs_that_are_waited_for_ring(held: Callable[[], Held]) -> None:
    rung, work = threading.Event(), held()
    threads = GrammarThreads(1, 1, rung.set)
    assert threads.submit("", quick).wait(LONG) and not rung.is_set()
    threads.submit("", work).rings = True
    work.free.set()
    assert rung.wait(LONG)


def test_a_thread_without_work_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_threads, "_IDLE_SECONDS", 0.01)
    threads = GrammarThreads(1, 1, lambda: None)
    job = threads.submit("", quick)
    assert job.wait(LONG) and job.thread is not None
    job.thread.join(LONG)
    assert not job.thread.is_alive()
    assert threads.submit("", quick).wait(LONG)
