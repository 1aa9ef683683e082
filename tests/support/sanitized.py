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
    # Checks are calls: where functions are inlined by hand, checks in their place take minutes to compile.
    *("-fno-sanitize-recover=all", "--param", "asan-instrumentation-with-call-threshold=0"),
)


def main() -> int:
    # The widest vectors are loaded by instructions that the compiler adds no check to.
    plainest = library.levels_here()[-1]
    with patch.object(library, "LEVELS", (replace(plainest, flags=(*plainest.flags, *FLAGS)),)):
        return int(pytest.main(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
