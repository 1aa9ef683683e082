"""The turns of tests: what costs much and fails seldom runs in parts, one of them each day."""

from collections import defaultdict
from collections.abc import Iterable
from zlib import crc32

NAMES = ("slow", "turns")
"""The names of the marks that give a test its days. Of several marks the nearest to the test holds."""

TURN_OF_SLOW = 14
"""The days in which every test marked `slow` without a number has had its turn."""

PARTS = {
    "bench": 3,
    "engine_core/joint_steps": 4,
    "engine_core/ranks": 4,
    "gpu/test_parts.py": 28,
    "models/conversion": 4,
    "models/families": 5,
    "models/gguf": 4,
    "models/lora": 3,
    "models/quantization": 5,
    "worker/kernels/cpu": 3,
    "worker/kernels/cuda": 14,
    "worker/ranks": 10,
}
"""The parts in which folders and files of `tests` run, by their paths. Of several paths the longest holds."""

Mark = tuple[str, tuple[int, ...]]
"""The name of a mark, and its arguments."""


def waiting_on(day: int, tests: Iterable[tuple[str, Mark | None]]) -> set[str]:
    """Return the names of the tests, given with their marks, that do not run on this day.

    Of the cases of a test marked `turns` one runs, or an nth part of those marked `turns(n)`; of the tests
    of a file that are marked `slow` a fourteenth, or an nth part of those marked `slow(n)`. Of the cases of
    a file in PARTS one part runs: all its tests have a case on the same days, as they share what was made for it.
    """
    waiting: set[str] = set()
    sharing: dict[tuple[str, int], list[str]] = defaultdict(list)
    cases: dict[tuple[str, int], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, mark in tests:
        file, _, test = name.partition("::")
        match mark:
            case ("slow", days):
                sharing[file, *(days or (TURN_OF_SLOW,))].append(name)
            case ("turns", days):
                sharing[name.partition("[")[0], *(days or (0,))].append(name)
            case _ if parts := parts_of(file):
                cases[file, parts][test.partition("[")[2] or test].append(name)
            case _:
                pass
    for (owner, days), names in sharing.items():
        # Files differ in whose turn is first. Tests of one file that have the same cases, or none, have them
        # on the same days, as they share what was made for a case or for the file.
        first, days = crc32(owner.partition("::")[0].encode()), days or len(names)
        waiting |= {name for place, name in enumerate(names, first) if (place - day) % days}
    for (file, parts), names_of in cases.items():
        for place, names in enumerate(names_of.values(), crc32(file.encode())):
            if (place - day) % parts:
                waiting.update(names)
    return waiting


def parts_of(file: str) -> int:
    """Return in how many parts the tests of a file run, whose path begins with `tests/`; 0 if all run every day."""
    path = file.removeprefix("tests/")
    found = [each for each in PARTS if path == each or path.startswith(f"{each}/")]
    return PARTS[max(found, key=len)] if found else 0
