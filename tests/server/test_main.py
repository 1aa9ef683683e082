"""The entry points: Ctrl-C at any time from the first import on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "server.run.commands":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""


@pytest.mark.parametrize("name", ["main", "serve", "bench"])
def test_ctrl_c_while_the_commands_are_imported_is_no_traceback(name: str) -> None:
    not_ignored = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{not_ignored}\n{INTERRUPTED_IMPORT}from server.main import {name}\n{name}()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_nothing_else_is_imported_before() -> None:
    code = "import sys, server.main; print([name for name in sys.modules if name.startswith('server.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "['server.main']\n"


def test_a_signal_that_is_ignored_stays_so() -> None:
    """A shell starts what it runs in the background so."""
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"{INTERRUPTED_IMPORT}from server.main import main\nmain()"
    )
    arguments = [sys.executable, "-c", code, "--version"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("models", [("demo",), ("demo", "minilm")])
def test_a_temporary_folder_with_too_long_a_name_is_no_traceback(
    tmp_path: Path, models: tuple[str, ...]
) -> None:
    folder = tmp_path / ("x" * 70)
    folder.mkdir()
    serve = [sys.executable, "-c", "from server.main import serve; serve()", *models, "--port", "0"]
    done = subprocess.run(
        serve, capture_output=True, text=True, timeout=60, env={**os.environ, "TMPDIR": str(folder)}
    )
    assert done.returncode == 2
    assert "set TMPDIR to a folder with a shorter name" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
