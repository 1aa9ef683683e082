"""What newcomers do: from a clone to Ctrl-C, with this Python's packages; a program of their own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/newcomer.sh"
TOOLS = ("git", "make", "curl")

pytestmark = [
    pytest.mark.slow(7),
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no clone"),
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason="git, make or curl is missing"),
]


def test_the_first_minutes_of_a_newcomer() -> None:
    made = {**os.environ, "VENV": sys.prefix}
    done = subprocess.run([SCRIPT], env=made, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the first chat" in done.stdout and "Ctrl-C to the end" in done.stdout


def test_a_program_beside_modules_of_our_names_is_told(tmp_path: Path) -> None:
    for name in ("server", "models"):
        (tmp_path / f"{name}.py").touch()
    (tmp_path / "app.py").write_text("from facet import LLM\nprint(LLM.__name__)\n")
    command = [sys.executable, str(tmp_path / "app.py")]
    made = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=made, capture_output=True, text=True, timeout=60)
    assert done.stdout == "LLM\n"
    for name in ("server", "models"):
        assert f"{tmp_path}/{name}.py is hidden by facet's package of the same name" in done.stderr
