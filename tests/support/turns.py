"""The turns of tests: some run on one day only, where all of them would take long."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from zlib import crc32

TURN_OF_SLOW = 14
"""The days in which every slow test has had its turn."""

Marks = Mapping[str, tuple[int, ...]]
"""The marks of a test by their names, with their arguments."""


def waiting_on(day: int, tests: Iterable[tuple[str, Marks]]) -> set[str]:
    """The names of the tests, given with their marks, that do not run on this day.

    Of the cases of a test marked `turns` one runs, or an nth part of those marked `turns(n)`; of the tests
    of a file that are marked `slow` a fourteenth.
    """
    waiting: set[str] = set()
    sharing: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name, marks in tests:
        if "slow" in marks:
            sharing[name.partition("::")[0], TURN_OF_SLOW].append(name)
        if "turns" in marks:
            (days,) = marks["turns"] or (0,)
            sharing[name.partition("[")[0], days].append(name)
    for (owner, days), names in sharing.items():
        first, days = crc32(owner.encode()), days or len(names)  # not all first cases on the same day
        waiting |= {name for place, name in enumerate(names, first) if (place - day) % days}
    return waiting
