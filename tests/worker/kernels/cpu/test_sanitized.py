"""The C kernels stay within their arrays: their tests run on a library that checks each access.

A kernel of that library that leaves an array ends its process, and so does one that divides by 0.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker.kernels.cpu.library import levels_here

pytestmark = [pytest.mark.timeout(600)]  # the first one compiles the library, too

ROOT = Path(__file__).parents[4]
FILES = (
    *("attention", "bounds", "choose_tokens", "encoder_attention", "experts", "grouped"),
    *("linear", "recurrent", "rotary", "rowwise", "sections", "vocabulary"),
)
"""The tests beside this one that call kernels with tensors of many sizes. Those of latent attention take
minutes: `bounds` has its kernels, too."""
RUNTIMES = ("libasan.so", "libubsan.so")
"""The libraries that code calls which gcc compiled with checks."""


@pytest.fixture(scope="module")
def preload() -> str:
    """The runtimes of the checks, as LD_PRELOAD names them."""
    if not levels_here():
        pytest.skip("there are no C kernels for this processor")
    ask = [["cc", f"-print-file-name={name}"] for name in RUNTIMES]
    try:
        found = [
            subprocess.run(each, capture_output=True, text=True, check=True).stdout.strip() for each in ask
        ]
    except OSError:
        pytest.skip("there is no C compiler")
    if not all(map(os.path.isabs, found)):
        pytest.skip("the C compiler has no sanitizers")
    return ":".join(found)


OUT_OF_BOUNDS = """
import ctypes
from sanitized import checked_level
from worker.kernels.cpu.library import open_library

numbers = (ctypes.c_float * 64)()
open_library(checked_level()).function("sum_squares")(numbers, 64, numbers, 1, 64, sections := 16, 0)
"""
"""A call that writes 16 sums where a kernel has places for 8."""


def run(preload: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the checked library, which is compiled first unless the cache folder has it."""
    environ = {
        **os.environ,
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps much until its process ends
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests" / "support"))),
    }
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)


def test_what_leaves_an_array_is_found(preload: str) -> None:
    done = run(preload, "-c", OUT_OF_BOUNDS)
    assert done.returncode != 0
    assert "norm.c" in done.stderr
    assert "index 8 out of bounds" in done.stderr


@pytest.mark.parametrize("name", FILES)
def test_no_kernel_leaves_its_arrays(preload: str, name: str) -> None:
    tests = f"tests/worker/kernels/cpu/test_{name}.py"
    done = run(preload, "tests/support/sanitized.py", "-q", "-x", "-p", "no:cacheprovider", tests)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
