"""The turns of tests: some run on one day only, where all of them would take long."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from zlib import crc32

WEEK = 7
"""The days in which every slow test has had its turn."""


def waiting_on(day: int, tests: Iterable[tuple[str, Collection[str]]]) -> set[str]:
    """The names of the tests, given with their marks, that do not run on this day.

    Of the cases of a test marked `turns` one runs, and of all tests marked `slow` a seventh.
    """
    waiting: set[str] = set()
    cases: dict[str, list[str]] = defaultdict(list)
    for name, marks in tests:
        if "turns" in marks:
            cases[name.partition("[")[0]].append(name)
        if "slow" in marks and crc32(name.encode()) % WEEK != day % WEEK:
            waiting.add(name)
    for names in cases.values():
        waiting |= {name for place, name in enumerate(names) if place != day % len(names)}
    return waiting
