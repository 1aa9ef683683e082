"""Runs programs in which kernels are compiled: in the process of tests they are interpreted."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_uninterpreted(
    program: str | Path, *given: object, timeout: float = 150, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program, as text or from a file, in which Triton compiles; it must end well."""
    code = [program] if isinstance(program, Path) else ["-c", program]
    run = subprocess.run(
        [sys.executable, *code, *map(str, given)],
        cwd=ROOT,
        env={
            **os.environ,
            "TRITON_INTERPRET": "0",
            "PYTHONPATH": f"{ROOT}:{ROOT}/tests/support",
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run
