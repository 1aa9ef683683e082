"""Runs tests of the C kernels on a library that checks each access: `python sanitized.py PYTEST_ARGUMENTS`.

The process needs the compiler's runtimes, which LD_PRELOAD names: Python itself is not compiled with them.
"""

import sys
from dataclasses import replace
from unittest.mock import patch

import pytest

from worker.kernels.cpu import library

FLAGS = (
    *("-O1", "-g1", "-fsanitize=address,bounds,shift,signed-integer-overflow,integer-divide-by-zero"),
    # Checks are calls: written out where functions are inlined, they take minutes to compile.
    *("-fno-sanitize-recover=all", "--param", "asan-instrumentation-with-call-threshold=0"),
)


def checked_level() -> library.Level:
    """The level with the narrowest vectors: wider ones are often loaded in ways that are not checked."""
    plainest = library.levels_here()[-1]
    return replace(plainest, flags=(*plainest.flags, *FLAGS))


def main() -> int:
    with patch.object(library, "LEVELS", (checked_level(),)):
        return int(pytest.main(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
