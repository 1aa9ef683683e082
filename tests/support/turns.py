"""The turns of tests: some run on one day only, where all of them would take long."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from zlib import crc32

NAMES = ("slow", "turns")
"""The names of the marks that give a test its days. Of several marks the nearest to the test holds."""

TURN_OF_SLOW = 14
"""The days in which every test marked `slow` without a number has had its turn."""

Mark = tuple[str, tuple[int, ...]]
"""The name of a mark, and its arguments."""


def waiting_on(day: int, tests: Iterable[tuple[str, Mark | None]]) -> set[str]:
    """The names of the tests, given with their marks, that do not run on this day.

    Of the cases of a test marked `turns` one runs, or an nth part of those marked `turns(n)`; of the tests
    of a file that are marked `slow` a fourteenth, or an nth part of those marked `slow(n)`.
    """
    waiting: set[str] = set()
    sharing: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name, mark in tests:
        match mark:
            case ("slow", days):
                sharing[name.partition("::")[0], *(days or (TURN_OF_SLOW,))].append(name)
            case ("turns", days):
                sharing[name.partition("[")[0], *(days or (0,))].append(name)
            case _:
                pass
    for (owner, days), names in sharing.items():
        # Files differ in whose turn is first. Tests of one file that have the same cases, or none, have them
        # on the same days, as they share what was made for a case or for the file.
        first, days = crc32(owner.partition("::")[0].encode()), days or len(names)
        waiting |= {name for place, name in enumerate(names, first) if (place - day) % days}
    return waiting
